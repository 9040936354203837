"""Distinguishes models by their files without reading all of their weights.

A file of the Hugging Face cache is a link to a blob that is named by a hash of its content, so the
blob's name identifies the file. Any other file of weights is identified by name, size, modification
time and a digest over samples of its bytes: about 1 MiB from the start (where safetensors files
keep names, dtypes and offsets of all tensors), from the end, and from evenly spaced offsets in
between. Training changes nearly every tensor, so samples detect it; the modification time detects
other changes. All other files are identified by their content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from offload.connector.model.cannot_change_kv import TRAINING_WEIGHTS, is_harmless_file, matches

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".tensors")
HEAD_BYTES = 256 * 1024
SAMPLE_BYTES = 64 * 1024
SAMPLES = 12
WHOLE_MAX = 32 * 1024 * 1024
"""Larger files that are not weights are sampled as well."""
FILES_SHOWN = 48
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_FILE_FORMATS = (
    "auto hf safetensors pt npcache fastsafetensors instanttensor mistral sharded_state "
    "runai_streamer runai_streamer_sharded gguf bitsandbytes"
)
"""Load formats that read the model's folder."""


def find_model(model: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder or file that contains a model: a local path, or its snapshot in the Hub's cache.

    ``cache`` is vLLM's configured download folder (``None``: the Hub's default). If vLLM has
    resolved the branch ``revision``, the snapshot is the one that vLLM loads, even if the branch
    has moved since. Returns ``None`` if the model is neither (for example an object store's
    address), if it is not downloaded yet, or if vLLM loads from another hub.
    """
    if os.path.exists(model):
        return Path(model)
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", model, re.ASCII) or _is_other_hub():
        return None
    cached = Path(cache or _hub_cache()) / f"models--{model.replace('/', '--')}"
    wanted = revision or "main"
    commit = commit_of(model, revision)
    if commit is None:
        try:
            commit = (cached / "refs" / wanted).read_text().strip()
        except (OSError, ValueError):
            commit = wanted
    snapshot = cached / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def commit_of(model: str, revision: str | None) -> str | None:
    """The commit to which vLLM has resolved a revision of this repository; ``None`` if it has
    not."""
    repository = getattr(revision, "_repo_id", None)  # of huggingface_hub's ResolvedRevision
    return getattr(revision, "resolved", None) if repository in (None, model) else None


def requested_revision(revision: str | None) -> str | None:
    """The revision that the user gave, without the commit to which vLLM has resolved it."""
    found: str | None = getattr(revision, "initial", revision)
    return found


def is_snapshot(path: Path) -> bool:
    """True for a snapshot in the Hub's cache, which is named by its commit."""
    return path.parent.name == "snapshots" and bool(_COMMIT.fullmatch(path.name))


def weights_identity(model_path: Path | None, *, subfolders: bool = False) -> dict[str, Any]:
    """Identifies these weights; ``kind`` is ``unknown`` if they cannot be identified.

    ``subfolders``: folders from which the model's code may load as well.
    """
    files = [] if model_path is None else _weight_files(model_path, subfolders=subfolders)
    if not files:
        return {"kind": "unknown"}
    top = model_path if model_path is not None and model_path.is_dir() else files[0].parent
    return {
        "kind": "files",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "digest": _digest([str(file.relative_to(top)), *file_identity(file)] for file in files),
    }


def loaded_weights(
    load_format: str, extra: object, model_path: Path | None, *, subfolders: bool = False
) -> dict[str, Any]:
    """Identifies the weights that a load format reads, which are not always the model's files.

    ``extra`` is vLLM's ``model_loader_extra_config``.
    """
    subfolders = subfolders and load_format in _FILE_FORMATS.split()
    return weights_identity(weights_path(load_format, extra, model_path), subfolders=subfolders)


def weights_path(load_format: str, extra: object, model_path: Path | None) -> Path | None:
    """The folder or file from which a load format reads weights; ``None`` if it is unknown."""
    if load_format in _FILE_FORMATS.split():
        return model_path
    if load_format == "tensorizer" and isinstance(extra, Mapping):
        return _tensorized(extra)
    return None


def model_files(model_path: Path | None, may_read: Callable[..., bool]) -> dict[str, str]:
    """A digest by name for each file in the model's folder that is not weights and may change KV.

    ``may_read``: see `offload.connector.model.cannot_change_kv`. Many files are combined into one
    digest.
    """
    if model_path is None:
        return {}
    folder = model_path if model_path.is_dir() else model_path.parent
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if not is_harmless_file(entry.name, may_read) and entry.is_file()
    )
    found = {name: _content(folder / name) for name in names}
    return found if len(found) <= FILES_SHOWN else {"all": _digest(found.items())[:32]}


def adapter_files(folder: Path) -> list[Path]:
    """The files of a LoRA adapter that influence its computation."""
    config = folder / "adapter_config.json"
    return [*_weight_files(folder, subfolders=False), *([config] if config.is_file() else [])]


def file_identity(file: Path) -> list[Any]:
    """Name and content of one file: a blob's name, or size, modification time and sampled
    digest."""
    blob = blob_of(file)
    if blob is not None:
        return [file.name, blob]
    found = file.stat()
    return [file.name, found.st_size, found.st_mtime_ns, _sampled(file, found.st_size)]


def blob_of(file: Path) -> str | None:
    """The name of the blob in the Hub's cache to which this file is a link; ``None`` if it is no
    such link. The name is a hash of the content."""
    if not file.is_symlink():
        return None
    target = Path(os.readlink(file))
    is_blob = target.parent.name == "blobs" and _BLOB.fullmatch(target.name)
    return target.name if is_blob else None


def digest_of(files: Iterable[Path]) -> bytes:
    """32 bytes that distinguish these files from others."""
    return bytes.fromhex(_digest(file_identity(file) for file in files))


def is_weights(name: str) -> bool:
    """True for the name of a file of weights that vLLM may load."""
    return Path(name).suffix in WEIGHT_SUFFIXES and not matches(name, TRAINING_WEIGHTS.split())


def _weight_files(model_path: Path, *, subfolders: bool) -> list[Path]:
    """The files of a folder whose names end like those of weights, sorted. If the path is that of a
    file, the result is this file."""
    if model_path.is_file():
        return [model_path]
    entries = model_path.rglob("*") if subfolders else model_path.iterdir()
    return sorted(entry for entry in entries if is_weights(entry.name) and entry.is_file())


def _tensorized(extra: Mapping[str, Any]) -> Path | None:
    """Tensorizer's file or, for sharded weights, its folder, if it is on this machine."""
    given = extra.get("tensorizer_config", extra)
    uri = str(given.get("tensorizer_uri") or given.get("tensorizer_dir") or "")
    path = Path(uri.removeprefix("file://"))
    if uri and "%" in path.name:
        path = path.parent
    return path if uri and path.exists() else None


def _content(file: Path) -> str:
    size = file.stat().st_size
    if size > WHOLE_MAX:
        return _digest(file_identity(file))[:32]
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _sampled(file: Path, size: int) -> str:
    total = hashlib.sha256()
    with file.open("rb", buffering=0) as raw:
        if size <= HEAD_BYTES + SAMPLES * SAMPLE_BYTES:
            total.update(raw.readall())
        else:
            total.update(raw.read(HEAD_BYTES))
            step = (size - SAMPLE_BYTES - HEAD_BYTES) // (SAMPLES - 1)
            for index in range(SAMPLES - 1):
                total.update(os.pread(raw.fileno(), SAMPLE_BYTES, HEAD_BYTES + index * step))
            total.update(os.pread(raw.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES))
    return total.hexdigest()


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def _hub_cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _is_other_hub() -> bool:
    from vllm import envs

    return bool(envs.VLLM_USE_MODELSCOPE)

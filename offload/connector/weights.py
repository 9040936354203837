"""Tells two sets of weights apart by their files, without reading all of them.

A file of the Hugging Face cache is a link to a blob named by its content: the name is enough. Any
other file counts by name, size, modification time and a digest over samples of its bytes: about
1 MiB from the start (where safetensors keep names, types and places of all tensors), the end and
evenly in between. Training changes nearly every tensor, so samples catch it; the time of
modification catches the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")
CONFIG_NAMES = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "adapter_config.json",
)
HEAD_BYTES = 256 * 1024
SAMPLE_BYTES = 64 * 1024
SAMPLES = 12
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)


def find_model(model: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder or file that holds a model: a local path, or its snapshot in the Hub's cache.

    ``cache`` is where vLLM was told to download to (``None``: the Hub's default). ``None`` if it
    is neither, for example an object store's address, or not downloaded yet.
    """
    if os.path.exists(model):
        return Path(model)
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", model, re.ASCII):
        return None
    home = Path(cache or _hub_cache()) / f"models--{model.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (home / "refs" / wanted).read_text().strip()
    except (OSError, ValueError):
        commit = wanted
    snapshot = home / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def weights_identity(place: Path | None) -> dict[str, Any]:
    """What tells these weights from others; ``kind`` is ``unknown`` where nothing can be said."""
    files = [] if place is None else _files(place, WEIGHT_SUFFIXES)
    if not files:
        return {"kind": "unknown"}
    return {
        "kind": "files",
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "digest": _digest(file_identity(file) for file in files),
    }


def config_identity(place: Path | None) -> str | None:
    """A digest of the model's configuration and code by content; ``None`` if there is neither."""
    if place is None:
        return None
    files = _files(place if place.is_dir() else place.parent, (".py",), CONFIG_NAMES)
    found = [[file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]
    return _digest(found) if found else None


def adapter_files(place: Path) -> list[Path]:
    """The files of a LoRA adapter that decide what it computes."""
    return _files(place, WEIGHT_SUFFIXES, CONFIG_NAMES)


def file_identity(file: Path) -> list[Any]:
    """Name and content of one file: a blob's name, or size, time and sampled digest."""
    if file.is_symlink():
        target = Path(os.readlink(file))
        if target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
            return [file.name, target.name]
    found = file.stat()
    return [file.name, found.st_size, found.st_mtime_ns, _sampled(file, found.st_size)]


def digest_of(files: Iterable[Path]) -> bytes:
    """32 bytes that tell these files from others."""
    return bytes.fromhex(_digest(file_identity(file) for file in files))


def _files(place: Path, suffixes: tuple[str, ...], names: tuple[str, ...] = ()) -> list[Path]:
    """The files of a folder with these endings or names, by name; a file stands for itself."""
    if place.is_file():
        return [place]
    found = [entry for entry in place.iterdir() if entry.suffix in suffixes or entry.name in names]
    return sorted(entry for entry in found if entry.is_file())


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

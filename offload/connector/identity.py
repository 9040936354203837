"""Collects from vLLM's configuration everything that decides what a stored block means.

Scheduler and workers compute this in different processes and must agree, so only what is settled
before the workers start is read, plus what the engine hands to both (the KV cache configuration).
The live Hugging Face configuration is not: models change it while they load. The number of blocks
is left out on purpose: it may change from start to start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from offload.config import OffloadConfig
from offload.connector.weights import (
    adapter_files,
    config_identity,
    digest_of,
    find_model,
    weights_identity,
)
from offload.errors import Problem
from offload.namespace import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

_SPEC_LEFT_OUT = frozenset({"kv_cache_specs", "num_speculative_blocks"})
TENSORS_SHOWN = 32
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")
_LONG_ROPE = ("longrope", '"su"')


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_blocks: int
) -> dict[str, Any]:
    """The fields of the namespace. Reads the headers of the weight files; raises ``OSError``.

    The data-parallel rank is not part of it: replicas compute the same blocks and differ only in
    their folder.
    """
    cache = vllm_config.cache_config
    return {
        "format": FORMAT_VERSION,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "device": str(vllm_config.device_config.device_type),
        "instructions": _instructions(),
        "attention_backend": _text(vllm_config.attention_config.backend),
        "model": _model(vllm_config, vllm_config.model_config),
        "draft": _draft(vllm_config),
        "cache": {
            "dtype": str(cache.cache_dtype),
            "skip_layers": list(cache.kv_cache_dtype_skip_layers),
            "mamba_dtype": str(cache.mamba_cache_dtype),
            "mamba_ssm_dtype": str(cache.mamba_ssm_cache_dtype),
            "mamba_mode": str(cache.mamba_cache_mode),
            "indexer_dtype": str(vllm_config.attention_config.indexer_kv_dtype),
        },
        "hash": _hash(vllm_config),
        "parallel": _parallel(vllm_config),
        "geometry": _geometry(vllm_config, kv_cache_config, chunk_blocks),
    }


def adapter_digest(lora_request: LoRARequest) -> bytes:
    """32 bytes that stand for the content of a LoRA adapter, to be mixed into its keys.

    vLLM's own hashes know an adapter by name and path only. The digest is taken when the adapter is
    first seen. If its files change while the server runs nobody can tell from here which version
    is loaded, so from then on every call gives another value: such requests find nothing and are
    found by nobody until a restart. The same holds for an adapter that cannot be read.
    Thread-safe; after the first call it costs a few ``stat``.
    """
    return _ADAPTERS.digest(lora_request.lora_path)


def startup_warnings(vllm_config: VllmConfig, config: OffloadConfig) -> list[str]:
    """What a user should know before serving; each line says what to do."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    lines = _hash_warnings(vllm_config) if config.tiers else []
    if transfer.kv_load_failure_policy == "fail":
        lines.append(
            "kv_load_failure_policy is 'fail' (vLLM's default): a read error ends the request. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        lines.append(
            "prefix caching is off: blocks are still stored and loaded by their hashes. Set "
            "--enable-prefix-caching to reuse them on the device, too"
        )
    return lines + (_weight_warnings(vllm_config) if config.tiers else [])


def check_vllm_config(vllm_config: VllmConfig) -> list[Problem]:
    """Settings of ``--kv-transfer-config`` itself that cannot work."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_role == "kv_both":
        return []
    what = f'loads and stores (got "{transfer.kv_role}")'
    return [Problem("kv_role", what, 'Use "kv_role": "kv_both".')]


def _model(vllm_config: VllmConfig, model: ModelConfig) -> dict[str, Any]:
    place = _place(vllm_config, model)
    overrides = _overrides(model)
    found = {
        "name": _model_name(model),
        "revision": model.revision,
        "code_revision": model.code_revision,
        "weights": _weights(vllm_config, model, place),
        "config": config_identity(_config_place(vllm_config, model) or place),
        "hf_overrides": overrides,
        "class_overrides": dict(model.model_class_overrides),
        "dtype": str(model.dtype),
        "quantization": _text(model.quantization),
        "quantization_config": _text(model.quantization_config),
        "load_format": str(vllm_config.load_config.load_format),
        "model_impl": _text(model.model_impl),
        "disable_sliding_window": bool(model.disable_sliding_window),
    }
    if _has_long_rope(place, overrides):
        # Such models choose between two sets of frequencies by the configured length.
        found["max_model_len"] = model.max_model_len
    return found


def _model_name(model: ModelConfig) -> str:
    """The name as the user gave it: offline, vLLM replaces it by its place in the Hub's cache."""
    name = str(model.model_weights or model.model)
    snapshot = _SNAPSHOT.fullmatch(name)
    return snapshot[1].replace("--", "/", 1) if snapshot else name


def _place(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    name = model.model_weights or model.model
    return find_model(name, model.revision, vllm_config.load_config.download_dir)


def _config_place(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    if not model.hf_config_path:
        return None
    return find_model(model.hf_config_path, model.revision, vllm_config.load_config.download_dir)


def _weights(vllm_config: VllmConfig, model: ModelConfig, place: Path | None) -> dict[str, Any]:
    if str(vllm_config.load_config.load_format) == "dummy":
        return {"kind": "dummy", "seed": model.seed}
    found = weights_identity(place)
    if found["kind"] == "unknown" and vllm_config.kv_transfer_config is not None:
        # Nobody can tell these weights from others: the blocks are good for this engine only.
        found["engine"] = vllm_config.kv_transfer_config.engine_id
    return found


def _instructions() -> list[str]:
    """What decides the kernels, and with them the bytes of a page, where vLLM chooses by itself:
    the CPU's vector and matrix extensions, or the GPU's compute capability."""
    # vLLM asks the management library: the engine process must not make a context on a GPU.
    capability = current_platform.get_device_capability()
    if capability is not None:
        return [f"sm{capability.major}{capability.minor}"]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), *_matrix_extensions()]


def _matrix_extensions() -> list[str]:
    return ["amx"] if torch.cpu._is_amx_tile_supported() else []


def _overrides(model: ModelConfig) -> Any:
    """``hf_overrides`` as JSON values; a function counts by its name, which is all it shows."""
    if callable(model.hf_overrides):
        function = model.hf_overrides
        return f"function {function.__module__}.{getattr(function, '__qualname__', function)}"
    return json.loads(json.dumps(model.hf_overrides, sort_keys=True, default=str))


def _has_long_rope(place: Path | None, overrides: Any) -> bool:
    text = json.dumps(overrides)
    config = None if place is None else (place if place.is_dir() else place.parent) / "config.json"
    if config is not None and config.is_file():
        text += config.read_text(errors="replace")
    return any(word in text for word in _LONG_ROPE)


def _draft(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """The draft model, whose KV lies in the same blocks; ``None`` where drafts need no model."""
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config if speculative else None
    if speculative is None or model is None or speculative.method in ("ngram", "suffix"):
        return None
    return {
        "method": _text(speculative.method),
        "cache_dtype": _text(speculative.kv_cache_dtype),
        **_model(vllm_config, model),
    }


def _hash(vllm_config: VllmConfig) -> dict[str, Any]:
    """Algorithm and seed of the block hashes, by the rule of ``resolve_none_hash_seed``.

    A random seed is known to one process only; the engine's id stands for it, because both change
    with every start.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = DEFAULT_NONE_HASH_SEED
        if _seed_is_random(vllm_config):
            transfer = vllm_config.kv_transfer_config
            seed = f"random of engine {transfer.engine_id if transfer else None}"
    return {"algorithm": str(algorithm), "seed": seed}


def _seed_is_random(vllm_config: VllmConfig) -> bool:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ


def _parallel(vllm_config: VllmConfig) -> dict[str, int]:
    parallel = vllm_config.parallel_config
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "decode_context": parallel.decode_context_parallel_size,
        "dcp_interleave": parallel.dcp_kv_cache_interleave_size,
        "cp_interleave": parallel.cp_kv_cache_interleave_size,
    }


def _geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_blocks: int
) -> dict[str, Any]:
    cache = vllm_config.cache_config
    return {
        "chunk_blocks": chunk_blocks,
        "layout": _text(kv_cache_config.kv_cache_layout or cache.kv_cache_layout),
        "hash_block_size": kv_cache_config.hash_block_size or cache.hash_block_size,
        "groups": [
            {
                "layers": _digest(list(group.layer_names)),
                "layer_count": len(group.layer_names),
                "draft": group.is_eagle_group,
                **_spec(group.kv_cache_spec),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
        "tensors": _tensors(kv_cache_config.kv_cache_tensors),
    }


def _spec(spec: KVCacheSpec) -> dict[str, Any]:
    """A group's spec. For layers of different sizes the first layer's, which is all that the
    scheduler gets to see of them; their pages are told apart by the tensors."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    fields = {
        field.name: str(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in _SPEC_LEFT_OUT
    }
    return {"kind": type(spec).__name__, "page_bytes": spec.page_size_bytes, **fields}


def _tensors(tensors: list[KVCacheTensor]) -> Any:
    """All of them where that fits a manifest, else a digest."""
    found = [_tensor(tensor) for tensor in tensors]
    return found if len(found) <= TENSORS_SHOWN else {"count": len(found), "digest": _digest(found)}


def _tensor(tensor: KVCacheTensor) -> dict[str, Any]:
    """Where pages lie within a block; what grows with the number of blocks is left out."""
    packed = tensor.layer_stride < tensor.block_stride
    return {
        "layers": _digest(list(tensor.layers)),
        "block_stride": tensor.block_stride,
        "layer_stride": tensor.layer_stride if packed else None,
        "offset": tensor.offset if tensor.offset < tensor.block_stride else None,
    }


def _hash_warnings(vllm_config: VllmConfig) -> list[str]:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    use = "Use --prefix-caching-hash-algo sha256_cbor"
    lines = []
    if _seed_is_random(vllm_config):
        lines.append(
            f"block hashes change at every start with {algorithm} and no PYTHONHASHSEED: nothing "
            f"on disk will be found after a restart. {use}"
        )
    if algorithm.startswith("xxhash"):
        lines.append(
            f"{algorithm} is not collision resistant: a client who can choose prompts could make "
            f"two of them share blocks. {use} where clients do not trust each other"
        )
    if algorithm == "sha256":
        lines.append(
            "block hashes of sha256 go through pickle and may differ for equal content, which "
            f"costs hits after a restart (never a wrong one). {use}"
        )
    return lines


def _weight_warnings(vllm_config: VllmConfig) -> list[str]:
    model = vllm_config.model_config
    lines = []
    if _weights(vllm_config, model, _place(vllm_config, model))["kind"] == "unknown":
        lines.append(
            f"no weight files were found for {model.model}: other weights under the same name "
            "cannot be told apart, so stored blocks are not used after a restart"
        )
    if callable(model.hf_overrides):
        lines.append(
            "hf_overrides is a function and known by its name only. Clear the tiers' folders "
            "whenever it changes"
        )
    return lines


class _AdapterDigests:
    """Digests of adapters by path, with the state of the files they were taken from."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, tuple[tuple[str, int, int, int], ...]]] = {}
        self._lock = threading.Lock()

    def digest(self, path: str) -> bytes:
        try:
            with self._lock:
                if path not in self._known:
                    self._known[path] = self._take(path)
                digest, taken_from = self._known[path]
            if tuple(_state(name) for name, *_ in taken_from) == taken_from:
                return digest
        except OSError:
            pass  # unreadable: nothing can be said, as below
        return secrets.token_bytes(32)

    @staticmethod
    def _take(path: str) -> tuple[bytes, tuple[tuple[str, int, int, int], ...]]:
        place = find_model(path, None, None)
        files = adapter_files(place) if place else []
        if not files:
            raise FileNotFoundError(path)
        before = tuple(_state(str(file)) for file in files)
        return digest_of(files), before


_ADAPTERS = _AdapterDigests()


def _state(name: str) -> tuple[str, int, int, int]:
    found = os.stat(name)
    return name, found.st_size, found.st_mtime_ns, found.st_ino


def _text(value: Any) -> str | None:
    """A setting as text; an enum by its name, an object with fields by its canonical content."""
    if value is None:
        return None
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, default=str)
    return str(getattr(value, "name", value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]

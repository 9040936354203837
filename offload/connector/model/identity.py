"""Collects every part of vLLM's configuration that decides the meaning of a stored block.

Each worker computes the identity independently, and all workers must agree. The scheduler adopts it
from them (`offload.connector.startup`), because the workers hold the weights and run the kernels.
The live Hugging Face configuration is not read, because models change it while they load. The
number of blocks is left out on purpose: it may change between starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from offload.connector.compat import cache_dtype_handler
from offload.connector.model.files_at_start import (
    Source,
    changed_file,
    configuration_in,
    only,
    start_of,
    uses_ray,
    weights_in,
)
from offload.connector.model.settings import (
    counting,
    environment_of,
    file_digest,
    libraries,
    plain,
    settings_of,
)
from offload.connector.model.source_code import CodeNames, names_in
from offload.connector.model.weights_digest import (
    find_model,
    loaded_weights,
    model_files,
    requested_revision,
    weights_path,
)
from offload.namespaces.manifest import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

logger = logging.getLogger(__name__)

_SPEC_LEFT_OUT = frozenset({"kv_cache_specs", "num_speculative_blocks"})
TENSORS_SHOWN = 32
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")
_VECTORS = re.compile("amx|avx|bf16|dot|fhm|fma|fp16|i8mm|neon|sme|sve")
"""Names in ``torch.cpu.get_capabilities`` of what computes; others are about encryption, bits or
caches."""
_LONG_ROPE = ("longrope", '"su"')
_LOADER_HARMLESS = (
    "enable_multithread_load num_threads concurrency memory_limit distributed num_readers "
    "verify_hash enable_weights_track"
)
"""Keys of ``model_loader_extra_config`` that decide how weights are read, but not which weights."""


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_blocks: int
) -> dict[str, Any]:
    """The fields of the namespace. Reads files of the model; raises ``OSError``.

    The data-parallel rank is not included: replicas compute the same blocks, and only their folders
    differ.
    """
    return {
        **content_of(vllm_config),
        "hash": hash_fields(vllm_config),
        "parallel": _parallel(vllm_config),
        "geometry": geometry_fields(vllm_config, kv_cache_config, chunk_blocks),
    }


def content_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """The fields that identify what is computed, apart from its shape and its keys."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    draft = _draft_model(vllm_config)
    codes = [names_in(each) for each in (model, draft) if each is not None]
    return {
        "format": FORMAT_VERSION,
        "vllm": vllm.__version__,
        "libraries": libraries(media=model.multimodal_config is not None),
        "device": str(vllm_config.device_config.device_type),
        "instructions": _instructions(),
        "attention_backend": _text(vllm_config.attention_config.backend),
        "model": _model(vllm_config, model, vllm_config.load_config, codes[0]),
        "draft": _draft(vllm_config, draft, codes[-1]),
        "cache": {
            "dtype": str(cache.cache_dtype),
            **_dtype_handler(cache.cache_dtype),
            "skip_layers": list(cache.kv_cache_dtype_skip_layers),
            "mamba_dtype": str(cache.mamba_cache_dtype),
            "mamba_ssm_dtype": str(cache.mamba_ssm_cache_dtype),
            "mamba_mode": str(cache.mamba_cache_mode),
            "indexer_dtype": str(vllm_config.attention_config.indexer_kv_dtype),
        },
        "settings": settings_of(vllm_config),
        "environment": environment_of(
            os.environ, frozenset().union(*(code.variables for code in codes))
        ),
    }


def weights_of(
    vllm_config: VllmConfig, model: ModelConfig, load: LoadConfig, model_path: Path | None
) -> dict[str, Any]:
    """Identifies the weights.

    If the weights do not come from files, or if their origin is unknown, the identity includes the
    engine's id: the blocks then belong to this engine alone.
    """
    kind = _not_from_files(vllm_config, load)
    subfolders = _reads_subfolders(names_in(model))
    found = {"kind": kind} if kind else loaded_weights(
        str(load.load_format), load.model_loader_extra_config, model_path, subfolders=subfolders
    )  # fmt: skip
    if found["kind"] == "dummy":
        found["seed"] = model.seed
    if found["kind"] != "files" and vllm_config.kv_transfer_config is not None:
        found["engine"] = vllm_config.kv_transfer_config.engine_id
    return found


def model_path_of(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    """The path of the model's files, as far as it can be found."""
    name = model.model_weights or model.model
    return find_model(name, model.revision, vllm_config.load_config.download_dir)


def _reads_subfolders(code: CodeNames) -> bool:
    """True if a model with this code may load weights from the folders in its folder."""
    return code.may_read("secondary_weights", "subfolder")


def _config_source(
    vllm_config: VllmConfig, model: ModelConfig, code: CodeNames, model_path: Path | None
) -> Source | None:
    """The configuration, if it lies elsewhere than the weights: it was given separately, or the
    weights have a separate download folder, which vLLM does not use for the configuration."""
    name = model.hf_config_path or model.model
    revision = vars(model).get("_hf_config_revision") or model.revision
    path = find_model(name, revision, None)
    if path is None and model.hf_config_path:
        path = find_model(name, revision, vllm_config.load_config.download_dir)
    is_apart = model_path is not None and path not in (None, model_path)
    if not model.hf_config_path and not is_apart:
        return None
    return Source(name, path, configuration_in(code.may_read), revision)


def seed_is_random(vllm_config: VllmConfig) -> bool:
    """True if block hashes differ at every start."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ


def _not_from_files(vllm_config: VllmConfig, load: LoadConfig) -> str:
    """The origin of weights that do not come from the model's files."""
    if vllm_config.weight_transfer_config is not None:
        return "pushed"
    return "dummy" if str(load.load_format) == "dummy" else ""


def _model(
    vllm_config: VllmConfig, model: ModelConfig, load: LoadConfig, code: CodeNames
) -> dict[str, Any]:
    model_path = model_path_of(vllm_config, model)
    overrides = plain_overrides(model)
    found = {
        "name": _model_name(model),
        "revision": requested_revision(model.revision),
        "code_revision": model.code_revision,
        "weights": weights_of(vllm_config, model, load, model_path),
        "files": model_files(model_path, code.may_read),
        "hf_overrides": overrides,
        "class_overrides": dict(model.model_class_overrides),
        "dtype": str(model.dtype),
        "quantization": _text(model.quantization),
        "quantization_config": plain(model.quantization_config),
        "load_format": str(load.load_format),
        "loader": _loader(load),
        "model_impl": _text(model.model_impl),
        "disable_sliding_window": bool(model.disable_sliding_window),
        "settings": dict(counting(model)),
    }
    config = _config_source(vllm_config, model, code, model_path)
    if config is not None:
        found["config_files"] = model_files(config.path, code.may_read)
    if model.multimodal_config is not None:
        scales = file_digest(model.multimodal_config.mm_encoder_fp8_scale_path)
        found["media"] = dict(counting(model.multimodal_config)) | {"fp8_scales": scales}
    config_path = config.path if config is not None else None
    found |= _if_read(vllm_config, model, code, [config_path or model_path, model_path], overrides)
    return found | _if_changed(vllm_config, model, load, code, config)


def _if_changed(
    vllm_config: VllmConfig,
    model: ModelConfig,
    load: LoadConfig,
    code: CodeNames,
    config: Source | None,
) -> dict[str, Any]:
    """If files have changed since vLLM began to read the model, it is unknown which weights were
    loaded: the blocks then belong to this start of the server alone, even if the user has given the
    engine an id."""
    sources = _sources(vllm_config, model, load, code)
    ray = uses_ray(vllm_config)
    given = (each for each in (*sources, config) if each is not None)
    change = next(filter(None, (changed_file(model, each, under_ray=ray) for each in given)), "")
    if not change:
        return {}
    logger.warning(_CHANGED, change, model.model)
    transfer = vllm_config.kv_transfer_config
    engine = transfer.engine_id if transfer is not None else None
    start = start_of(model) or vars(vllm_config).get("instance_id")
    return {"weights": {"kind": "changed", "engine": f"{engine} {start}"}}


_CHANGED = (
    "kvtiers: %s. So it is not known which version of %s vLLM has loaded. This server uses no "
    "blocks that others have stored, and neither other servers nor its own next start will use "
    "the blocks that it stores on disk or shares. Start it again once the files no longer change"
)


def _sources(
    vllm_config: VllmConfig, model: ModelConfig, load: LoadConfig, code: CodeNames
) -> Iterator[Source]:
    """The files that identify a model, except those of `_config_source`."""
    path, may_read = model_path_of(vllm_config, model), code.may_read
    name, revision = str(model.model_weights or model.model), model.revision
    if not _not_from_files(vllm_config, load):
        weights = weights_path(str(load.load_format), load.model_loader_extra_config, path)
        subfolders = _reads_subfolders(code)
        yield Source(name, weights, weights_in(weights), revision, subfolders)
    yield Source(name, path, configuration_in(may_read), revision)
    if may_read("tokenizer"):
        where, tokenizer = _tokenizer_path(vllm_config, model), str(model.tokenizer)
        yield Source(tokenizer, where, configuration_in(may_read), model.tokenizer_revision)
    if may_read("generation_config"):
        where = _generation_folder(model, path)
        given = name if where == path else str(where)
        yield Source(given, where, only("generation_config.json"), revision)
    if model.multimodal_config is not None:
        scales = model.multimodal_config.mm_encoder_fp8_scale_path
        if scales and Path(scales).is_file():
            yield Source(scales, Path(scales), only(scales))


def _generation_folder(model: ModelConfig, model_path: Path | None) -> Path | None:
    """The folder with the defaults of generation."""
    given = model.generation_config
    return model_path if given in ("auto", "vllm") else Path(given)


def _generation_file(model: ModelConfig, model_path: Path | None) -> str | None:
    folder = _generation_folder(model, model_path)
    return str(folder / "generation_config.json") if folder is not None else None


def _tokenizer_path(vllm_config: VllmConfig, model: ModelConfig) -> Path | None:
    cache = vllm_config.load_config.download_dir
    return find_model(str(model.tokenizer), model.tokenizer_revision, cache)


def _if_read(
    vllm_config: VllmConfig,
    model: ModelConfig,
    code: CodeNames,
    paths: list[Path | None],
    overrides: Any,
) -> dict[str, Any]:
    """Settings that affect the forward pass of only some models.

    These models name the settings in their code. Long RoPE is another case: it chooses one of two
    sets of frequencies by the configured length. ``paths``: of the configuration and of the model.
    """
    found: dict[str, Any] = {}
    model_path = paths[-1]
    if code.may_read("max_model_len") or _may_have_long_rope(paths, overrides):
        found["max_model_len"] = model.max_model_len
    if code.may_read("generation_config"):
        found["generation"] = {
            "from": model.generation_config,
            "file": file_digest(_generation_file(model, model_path)),
            "override": plain(model.override_generation_config),
        }
    if code.may_read("tokenizer"):
        where = _tokenizer_path(vllm_config, model)
        found["tokenizer"] = {
            "name": None if where == model_path else str(model.tokenizer),
            "revision": requested_revision(model.tokenizer_revision),
            "mode": _text(model.tokenizer_mode),
            "files": {} if where == model_path else model_files(where, code.may_read),
        }
    return found


def _loader(load: LoadConfig) -> Any:
    """The loader's settings, without its format."""
    extra = load.model_loader_extra_config or {}
    given = dict(extra.get("tensorizer_config", extra))
    harmless = _LOADER_HARMLESS.split()
    return plain({name: each for name, each in given.items() if name not in harmless})


def _model_name(model: ModelConfig) -> str:
    """The name as the user gave it. Offline, vLLM replaces it by its path in the Hub's cache."""
    name = str(model.model_weights or model.model)
    snapshot = _SNAPSHOT.fullmatch(name)
    return snapshot[1].replace("--", "/", 1) if snapshot else name


def _instructions() -> dict[str, Any]:
    """The processor features by which vLLM chooses kernels, and which therefore decide the bytes of
    a page, by name: the CPU's vector and matrix extensions, or the GPU's compute capability."""
    # vLLM queries the management library, because the engine process must not create a context on a
    # GPU.
    capability = current_platform.get_device_capability()
    if capability is not None:
        return {"compute_capability": f"{capability.major}.{capability.minor}"}
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"machine": platform.machine(), "kernels": kernels, **_extensions()}


def _extensions() -> dict[str, Any]:
    """The vector and matrix extensions of the CPU, one by one: vLLM and oneDNN have other kernels
    for AVX-512 with bfloat16 than without, and for each kind of AMX."""
    found = torch.cpu.get_capabilities()
    return {name: value for name, value in found.items() if value and _VECTORS.match(name)}


def plain_overrides(model: ModelConfig) -> Any:
    """``hf_overrides`` as JSON values; a function is identified by its name, because nothing else
    about it is known."""
    if callable(model.hf_overrides):
        return f"function {plain(model.hf_overrides)}"
    return json.loads(json.dumps(model.hf_overrides, sort_keys=True, default=str))


def _may_have_long_rope(paths: Iterable[Path | None], overrides: Any) -> bool:
    """True if the model has long RoPE, or if that cannot be determined."""
    folders = [path if path.is_dir() else path.parent for path in paths if path]
    files = [
        file
        for folder in folders
        for file in (*folder.glob("*config*.json"), *folder.glob("params.json"))
    ]
    texts = [json.dumps(overrides), *(file.read_text(errors="replace") for file in files)]
    return not files or any(word in text for text in texts for word in _LONG_ROPE)


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """The draft model, whose KV lies in the same blocks; ``None`` if drafts need no model."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in ("ngram", "suffix"):
        return None
    return speculative.draft_model_config


def _draft(
    vllm_config: VllmConfig, model: ModelConfig | None, code: CodeNames
) -> dict[str, Any] | None:
    speculative = vllm_config.speculative_config
    if speculative is None or model is None:
        return None
    load = speculative.draft_load_config or vllm_config.load_config
    return {
        "method": _text(speculative.method),
        "cache_dtype": _text(speculative.kv_cache_dtype),
        **_dtype_handler(speculative.kv_cache_dtype),
        "speculative": dict(counting(speculative)),
        **_model(vllm_config, model, load, code),
    }


def _dtype_handler(dtype: Any) -> dict[str, Any]:
    """Identifies the handler of a dtype that a plugin has registered, because different handlers
    may have the same dtype name and quantization mode. Empty for the dtypes of vLLM itself."""
    handler = cache_dtype_handler(str(dtype))
    if handler is None:
        return {}
    kind = type(handler)
    source = file_digest(inspect.getsourcefile(kind))
    return {"dtype_handler": f"{kind.__module__}.{kind.__qualname__} {source}"}


def hash_fields(vllm_config: VllmConfig) -> dict[str, Any]:
    """Algorithm and seed of the block hashes, by the rule of ``resolve_none_hash_seed``.

    Only one process knows a random seed. The engine's id replaces it here, because both change at
    every start.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = DEFAULT_NONE_HASH_SEED
        if seed_is_random(vllm_config):
            transfer = vllm_config.kv_transfer_config
            seed = f"random of engine {transfer.engine_id if transfer else None}"
    return {"algorithm": str(algorithm), "seed": seed}


def _parallel(vllm_config: VllmConfig) -> dict[str, int]:
    parallel = vllm_config.parallel_config
    return {
        # Experts are spread over all replicas; replicas of other models are independent.
        "data": 1 if parallel.is_moe_model is False else parallel.data_parallel_size,
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "decode_context": parallel.decode_context_parallel_size,
        "dcp_interleave": parallel.dcp_kv_cache_interleave_size,
        "cp_interleave": parallel.cp_kv_cache_interleave_size,
    }


def geometry_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_blocks: int
) -> dict[str, Any]:
    """How blocks are divided into chunks and laid out. The scheduler also computes this."""
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
    """A group's spec. If the group's layers have different sizes, this is the spec of the first
    layer, because the scheduler sees no other; ``_tensors`` distinguishes their pages."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    fields = {
        field.name: str(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.compare and field.name not in _SPEC_LEFT_OUT
    }
    return {"kind": type(spec).__name__, "page_bytes": spec.page_size_bytes, **fields}


def _tensors(tensors: list[KVCacheTensor]) -> Any:
    """All tensors if they fit into a manifest, otherwise a digest of them."""
    found = [_tensor(tensor) for tensor in tensors]
    return found if len(found) <= TENSORS_SHOWN else {"count": len(found), "digest": _digest(found)}


def _tensor(tensor: KVCacheTensor) -> dict[str, Any]:
    """The positions of pages within a block, without values that depend on the number of blocks."""
    packed = tensor.layer_stride < tensor.block_stride
    return {
        "layers": _digest(list(tensor.layers)),
        "block_stride": tensor.block_stride,
        "layer_stride": tensor.layer_stride if packed else None,
        "offset": tensor.offset if tensor.offset < tensor.block_stride else None,
    }


def _text(value: Any) -> str | None:
    """A setting as text, an enum by its name."""
    return None if value is None else str(getattr(value, "name", value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]

"""Finds vLLM's layout of a model's KV caches without loading weights or allocating memory.

The model is built on torch's meta device, exactly as a worker builds it, and vLLM's own functions
derive block sizes, groups and placements from its attention layers. Stand-ins of the right size
replace the process groups, so any parallel layout can be examined on one machine.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.config import (
    KVTransferConfig,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, iter_layer_specs
from vllm.v1.worker.utils import customize_attention_spec, prepare_kernel_block_sizes

from offload.config.kv_transfer_config import NAME
from offload.connector.compat.doctor import make_arg_parser, make_kv_cache_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLAIN = {
    "kv_connector": NAME,
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
}
"""Options that select this connector with an empty configuration. vLLM's hash and block sizes
depend on whether a connector is used, and on which kinds of layers it supports."""

BYTES_TO_PLAN_WITH = 1 << 44
"""Memory for the blocks if the user gives none: large enough for any context."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe.

    ``kernel_tokens[g]`` is the kernel block size of group ``g``; ``asked_block`` is the user's
    ``--block-size`` or ``None``; ``platform`` is vLLM's name of this platform; ``parameters`` is
    the number of parameters on one rank.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kernel_tokens: tuple[int, ...]
    asked_block: int | None
    platform: str
    parameters: int


class FlagsError(Exception):
    """vLLM's parser does not understand some flags; the text names these flags and gives the
    reason."""


class _ServeFlags(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Parses flags as ``vllm serve`` does, but raises an error instead of ending the process.

    It accepts the flags of the API server, and the spellings that only ``parse_args`` understands:
    ``--max_model_len``, ``--config FILE`` and ``--kv-transfer-config.kv_role``.
    """

    def error(self, message: str) -> NoReturn:
        raise FlagsError(message + self._alternatives(message))

    def _alternatives(self, message: str) -> str:
        """Suggest existing flags that resemble the unknown ones."""
        if not message.startswith("unrecognized arguments"):
            return ""
        known = [name for action in self._actions for name in action.option_strings]
        wrong = [word.split("=")[0] for word in message.split() if word.startswith("--")]
        near = [difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in wrong]
        found = " and ".join(name for names in near for name in names)
        return f". Did you mean {found}?" if found else ""


def _serve_flags() -> FlexibleArgumentParser:
    """A parser with every flag of ``vllm serve``."""
    return make_arg_parser(_ServeFlags())


def probe(model: str, flags: Sequence[str], transfer: Mapping[str, Any] | None = None) -> Probe:
    """Probe the KV cache configuration of a model under these flags of ``vllm serve``.

    ``transfer`` replaces the value of ``--kv-transfer-config``. Raises ``FlagsError``, and whatever
    vLLM raises for a model or flags that it refuses.
    """
    parsed = _serve_flags().parse_args(["--model", model, *flags])
    if parsed.model_tag is not None:
        raise FlagsError(f"unrecognized arguments: {parsed.model_tag}")
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    if transfer is not None or arguments.kv_transfer_config is None:
        arguments.kv_transfer_config = KVTransferConfig(**(PLAIN if transfer is None else transfer))
    config = arguments.create_engine_config()
    register_all_kvcache_specs(config)
    with set_current_vllm_config(config), _stand_in_groups(config):
        parameters = _build_models(config)
        current_platform.update_block_size_for_backend(config)
        specs = _layer_specs(config)
        _resolve_placement(config, specs)
        memory = config.cache_config.kv_cache_memory_bytes or BYTES_TO_PLAN_WITH
        kv_cache_config = make_kv_cache_config(config, specs, memory)
        kernel = _kernel_tokens(config, kv_cache_config)
    name = current_platform.device_name
    asked = parsed.block_size
    return Probe(config, kv_cache_config, kernel, asked, name, parameters)


class _StandInGroup:
    """A process group as rank 0 sees it, for code that only reads sizes."""

    device_communicator = None
    local_rank = rank = rank_in_group = 0
    is_first_rank = True

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.is_last_rank = size == 1
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: 0)


@contextlib.contextmanager
def _stand_in_groups(config: VllmConfig) -> Iterator[None]:
    """Replace vLLM's process groups by stand-ins while the model is built."""
    parallel = config.parallel_config
    sizes = {
        "_WORLD": parallel.world_size,
        "_TP": parallel.tensor_parallel_size,
        "_ETP": parallel.tensor_parallel_size,
        "_PP": parallel.pipeline_parallel_size,
        "_DP": parallel.data_parallel_size,
        "_EP": parallel.tensor_parallel_size * parallel.data_parallel_size,
        "_EPLB": parallel.tensor_parallel_size * parallel.data_parallel_size,
        "_DCP": parallel.decode_context_parallel_size,
        "_PCP": parallel.prefill_context_parallel_size,
        "_ENGRAM_DP": 1,
    }
    before = {
        name: getattr(parallel_state, name) for name in sizes if hasattr(parallel_state, name)
    }
    try:
        for name in before:
            setattr(parallel_state, name, _StandInGroup(sizes[name]))
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def _build_models(config: VllmConfig) -> int:
    """Build the model, and the draft model if it has KV caches, on the meta device; returns the
    number of parameters of the model on this rank."""
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(config)
        parameters = int(sum(parameter.numel() for parameter in model.parameters()))
        speculative = config.speculative_config
        if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
            return parameters
        draft = _draft_config(config)
        if speculative.uses_draft_model():
            initialize_model(draft, prefix="draft_model")
        else:
            initialize_model(draft, model_config=speculative.draft_model_config)
        return parameters


def _draft_config(config: VllmConfig) -> VllmConfig:
    """The configuration that vLLM's proposer gives to its draft model.

    Only the two fields that this method reads are set: a complete proposer would need a model
    runner.
    """
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    speculative = config.speculative_config
    if speculative.uses_draft_model():
        kind = DraftModelProposer
    else:
        kind = DFlashProposer if speculative.use_dflash() else EagleProposer
    proposer = object.__new__(kind)
    proposer.vllm_config, proposer.speculative_config = config, speculative
    return proposer._create_draft_vllm_config()


def _layer_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer, like ``GPUModelRunner.get_kv_cache_spec``: layers that share another
    layer's cache have no spec."""
    specs = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs[name] = spec
    return specs


def _resolve_placement(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> None:
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    backends = list(dict.fromkeys(layer.get_attn_backend() for layer in layers))
    supported = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [supported], list(specs.values()))


def _kernel_tokens(config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The kernel block size of each group, by vLLM's own rule."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        specs = list(iter_layer_specs(group.kv_cache_spec))
        backends = [layers[name].get_attn_backend() for name in group.layer_names]
        if len(specs) == 1:
            specs *= len(backends)
        groups.append(
            [
                SimpleNamespace(backend=backend, kv_cache_spec=spec)
                for backend, spec in zip(backends, specs, strict=True)
            ]
        )
    return tuple(prepare_kernel_block_sizes(kv_cache_config, groups))

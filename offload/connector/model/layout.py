"""Translates vLLM's KV cache configuration into types of this project.

The configurations of scheduler and workers name the same groups. In the scheduler's configuration,
however, a group whose layers have different pages has only one layer's spec. So the number of
tokens can be read from either configuration, but the number of bytes only from a worker's
(``page_regions``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    iter_layer_specs,
)

from offload.errors import PageSizeError
from offload.layout.checks import GroupInput, LayoutInput, build_layout
from offload.layout.groups import FULL, STATE, WINDOW, GroupLayout, ModelLayout
from offload.layout.registration import (
    GroupCaches,
    LayerTensors,
    Registration,
    as_list,
    register_kv_caches,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheTensor

logger = logging.getLogger(__name__)


def model_layout(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_blocks: int
) -> ModelLayout:
    """Return the checked layout of a model. Raises ``LayoutError`` listing every problem.

    On the scheduler's side ``block_bytes`` may be wrong for layers with different pages.
    """
    return build_layout(layout_input(kv_cache_config, vllm_config, chunk_blocks))


def layout_input(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_blocks: int
) -> LayoutInput:
    """vLLM's layout, before it is checked."""
    parallel = vllm_config.parallel_config
    dcp = parallel.decode_context_parallel_size
    specs = kv_cache_config.kv_cache_groups
    drafts = _draft_groups(specs, vllm_config)
    groups = tuple(_group_input(i, g, dcp, i in drafts) for i, g in enumerate(specs))
    hash_tokens = kv_cache_config.hash_block_size
    if hash_tokens is None:
        hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    return LayoutInput(
        groups=groups,
        num_blocks=kv_cache_config.num_blocks,
        hash_tokens=hash_tokens,
        scheduler_tokens=math.lcm(*(group.block_tokens for group in groups)),
        chunk_blocks=chunk_blocks,
        context_parallel=dcp * parallel.prefill_context_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        max_tokens=vllm_config.model_config.max_model_len,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
    )


def _draft_groups(groups: list[KVCacheGroupSpec], vllm_config: VllmConfig) -> set[int]:
    """Groups whose last block is dropped from hits, by vLLM's own rule
    (``KVCacheCoordinator.eagle_group_ids``).

    These are the marked groups and all groups that share their spec, or all groups if a draft head
    is in use and none is marked.
    """
    marked = {i for i, group in enumerate(groups) if group.is_eagle_group}
    speculative = vllm_config.speculative_config
    if not marked and speculative is not None and speculative.use_eagle_block_drop():
        return set(range(len(groups)))
    specs = [groups[i].kv_cache_spec for i in marked]
    return {i for i, group in enumerate(groups) if group.kv_cache_spec in specs}


def _group_input(index: int, group: KVCacheGroupSpec, dcp: int, draft: bool) -> GroupInput:
    spec = group.kv_cache_spec
    layers = tuple(iter_layer_specs(spec))
    first = layers[0] if layers else spec
    return GroupInput(
        group=index,
        spec=get_kv_cache_spec_kind(spec).value,
        kind=_restore_rule(layers),
        layers=tuple(group.layer_names),
        block_tokens=resolve_dcp_kv_block_size(spec, dcp),
        block_bytes=sum(layer_page_bytes(group).values()),
        window_tokens=_window_tokens(first),
        span_tokens=getattr(first, "attention_chunk_size", 0)
        if isinstance(first, ChunkedLocalAttentionSpec)
        else 0,
        draft=draft,
        skipped=_why_skipped(group),
        refused=_why_refused(group),
        unaligned_state=any(
            isinstance(layer, MambaSpec) and layer.mamba_cache_mode != "align" for layer in layers
        ),
        per_token_scales=any(
            isinstance(layer, AttentionSpec) and layer.kv_quant_mode.is_per_token_head
            for layer in layers
        ),
    )


def _restore_rule(layers: tuple[KVCacheSpec, ...]) -> str:
    """The restore rule that all layers share; empty if they have none in common."""
    rules = {_layer_rule(layer) for layer in layers}
    return rules.pop() if len(rules) == 1 else ""


def _layer_rule(spec: KVCacheSpec) -> str:
    if isinstance(spec, FullAttentionSpec):
        return FULL
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return WINDOW
    return STATE if isinstance(spec, MambaSpec) else ""


def _window_tokens(spec: KVCacheSpec) -> int:
    """The number of tokens before a boundary that are still read.

    vLLM retains ``extra_retained_tokens`` additional tokens and caches every block that it retains,
    so these tokens must be correct as well.
    """
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    return int(spec.sliding_window - 1 + spec.extra_retained_tokens)


def _why_skipped(group: KVCacheGroupSpec) -> str:
    if not group.enable_kv_transfer:
        return "vLLM rebuilds it from another group after a load"
    if isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec):
        return "encoder-only layers keep no KV"
    if not group.kv_cache_spec.prefix_cacheable:
        return "scratch memory of one request, which takes no part in prefix caching"
    return ""


def _why_refused(group: KVCacheGroupSpec) -> str:
    if isinstance(group.kv_cache_spec, CrossAttentionSpec):
        return (
            "cross-attention keeps the encoder's states, which no token prefix identifies: "
            "encoder-decoder models cannot be offloaded"
        )
    if group.host_resident:
        return "HiSparse keeps these blocks in host memory already; serve without it to offload"
    return ""


def layer_page_bytes(group: KVCacheGroupSpec) -> dict[str, int]:
    """Bytes of each layer's page without padding."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: _page_bytes(spec.kv_cache_specs[name]) for name in group.layer_names}
    return {name: _page_bytes(spec) for name in group.layer_names}


def _page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a page without padding; 0 for kinds without such a number."""
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.real_page_size_bytes) if isinstance(spec, MambaSpec) else 0


def page_regions(
    layout: ModelLayout,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, LayerTensors],
) -> Registration:
    """The addresses of the pages of every offloaded layer on this worker.

    Each layer's tensor is checked against vLLM's placement (``KVCacheTensor``). Raises
    ``PageSizeError`` naming layers without a tensor, without a group, or in the wrong place.
    """
    _check_names(kv_cache_config, kv_caches)
    _check_places(layout, kv_cache_config, kv_caches)
    groups = []
    for group in layout.groups:
        spec = kv_cache_config.kv_cache_groups[group.group]
        layers = {name: kv_caches[name] for name in spec.layer_names}
        _say_kernel_blocks(group, kv_cache_config.num_blocks, layers)
        pages = layer_page_bytes(spec)
        groups.append(GroupCaches(group.group, group.chunk_blocks, layers, pages))
    return register_kv_caches(kv_cache_config.num_blocks, groups)


def _say_kernel_blocks(
    group: GroupLayout, num_blocks: int, layers: Mapping[str, LayerTensors]
) -> None:
    """Log once per group if the attention kernel's blocks are smaller than vLLM's."""
    kernel_blocks = {as_list(tensors)[0].shape[0] for tensors in layers.values()}
    ratio = max(kernel_blocks, default=0) // num_blocks
    if ratio > 1:
        logger.info(
            "kvtiers: group %d: a block of %d tokens is %d kernel blocks of %d tokens",
            group.group,
            group.block_tokens,
            ratio,
            group.block_tokens // ratio,
        )


def _check_names(config: KVCacheConfig, kv_caches: Mapping[str, LayerTensors]) -> None:
    """Check that every layer of a group has a tensor, and every tensor's layer a group.

    Layers that reuse another layer's cache (KV sharing) have no separate group.
    """
    owners = {name: i for i, g in enumerate(config.kv_cache_groups) for name in g.layer_names}
    problems = [
        f"layer {name} of group {group} has no KV cache tensor ({len(kv_caches)} registered)"
        for name, group in owners.items()
        if name not in kv_caches
    ]
    known = {_addresses(kv_caches[name]) for name in owners if name in kv_caches}
    problems += [
        f"layer {name} has a KV cache tensor but is in none of the "
        f"{len(config.kv_cache_groups)} groups, and does not share the memory of a layer in one of "
        f"them"
        for name, tensors in kv_caches.items()
        if name not in owners and _addresses(tensors) not in known
    ]
    _raise_page_errors(problems)


def _addresses(tensors: LayerTensors) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in as_list(tensors))


def _check_places(
    layout: ModelLayout, config: KVCacheConfig, kv_caches: Mapping[str, LayerTensors]
) -> None:
    """Check that each layer and its blocks lie where vLLM's placement says.

    ``KVCacheTensor``: block ``b`` of layer ``l`` is at ``offset + l * layer_stride + b *
    block_stride`` of the backing storage.
    """
    offloaded = {name for group in layout.groups for name in group.layers}
    problems = [
        problem
        for placement in config.kv_cache_tensors
        for position, name in enumerate(placement.layers)
        if name in offloaded and name in kv_caches
        for problem in _misplaced(name, position, placement, kv_caches[name], config.num_blocks)
    ]
    _raise_page_errors(problems)


def _misplaced(
    name: str, position: int, placement: KVCacheTensor, tensors: LayerTensors, num_blocks: int
) -> list[str]:
    first = as_list(tensors)[0]
    expected = placement.offset + position * placement.layer_stride
    found = first.data_ptr() - first.untyped_storage().data_ptr()
    problems = []
    if found != expected:
        problems.append(f"layer {name} begins at byte {found} of its storage, not at {expected}")
    kernel_blocks = max(1, first.shape[0] // num_blocks)
    stride = kernel_blocks * first.stride(0) * first.element_size()
    if num_blocks > 1 and stride != placement.block_stride:
        what = f"layer {name} has blocks every {stride} bytes, not every {placement.block_stride}"
        problems.append(what)
    return problems


def _raise_page_errors(problems: list[str]) -> None:
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise PageSizeError(f"kvtiers: the KV caches do not match their configuration:\n{lines}")

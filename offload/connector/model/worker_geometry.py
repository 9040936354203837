"""Describes the byte order of a worker's KV caches, for engines with another geometry.

vLLM 0.32 passes every attention layer as ``[B, H, N, C]``: kernel blocks, heads, tokens, and the
bytes of K and V (RFC #42082). Strides are taken from the real tensors. But the kernel decides what
the dimensions contain. A layer whose kernel is not known to follow them is described as one opaque
page, which only ranks with the same shape can read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from offload.layout.groups import ModelLayout
from offload.layout.registration import LayerTensors, Registration, as_list
from offload.namespaces.geometry import (
    COPIES,
    HEAD,
    HEADS,
    KERNEL_BLOCK,
    OWN,
    TOKEN,
    Geometry,
    GroupGeometry,
    LayerGeometry,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

BY_TOKEN = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Kernels that index all four dimensions: ``kv_cache.transpose(1, 2).split(head_size, -1)``."""
BY_HEAD = frozenset({"CPU_ATTN"})
"""Kernels that index blocks and heads, and store K and V of a head's tokens in a kernel-specific
order: ``kv_cache.view(blocks, heads, 2 * tokens, -1).chunk(2, 2)``, with K packed for the
processor."""


def describe(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layout: ModelLayout,
    kv_caches: Mapping[str, LayerTensors],
    registration: Registration,
    records: bytes,
) -> Geometry:
    """The geometry of this worker, whose records have the namespace ``records``."""
    parallel = vllm_config.parallel_config
    layers = vllm_config.compilation_config.static_forward_context
    groups = []
    for group, regions in zip(layout.groups, registration.groups, strict=True):
        pages: dict[str, int] = {}
        for region in regions.regions:  # in the order of their offsets within a slot
            pages[region.layer] = pages.get(region.layer, 0) + region.page_bytes
        spec = kv_cache_config.kv_cache_groups[group.group]
        described = tuple(
            _layer(
                name,
                _spec_of(spec, name),
                kernel_of(layers.get(name)),
                as_list(kv_caches[name]),
                kv_cache_config.num_blocks,
                group.block_tokens,
                page_bytes,
            )
            for name, page_bytes in pages.items()
        )
        groups.append(
            GroupGeometry(
                group.group,
                group.kind,
                f"{group.spec} draft" if group.draft else group.spec,
                group.block_tokens,
                group.chunk_blocks,
                described,
            )
        )
    return Geometry(
        records,
        parallel.rank,
        parallel.tensor_parallel_size,
        str(getattr(kv_cache_config.kv_cache_layout, "name", kv_cache_config.kv_cache_layout)),
        tuple(groups),
    )


def _spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def kernel_of(layer: Any) -> str:
    """The name of a layer's attention backend; empty if it has none."""
    find = getattr(layer, "get_attn_backend", None)
    return str(find().get_name()) if find is not None else ""


def _layer(
    name: str,
    spec: KVCacheSpec,
    kernel: str,
    tensors: list[torch.Tensor],
    num_blocks: int,
    block_tokens: int,
    page_bytes: int,
) -> LayerGeometry:
    found = None
    if len(tensors) == 1 and isinstance(spec, AttentionSpec) and tensors[0].dim() == 4:
        found = _attention(name, spec, kernel, tensors[0], num_blocks, block_tokens)
    if found is not None and found.page_bytes == page_bytes:  # else padding would be cut off
        return found
    shapes = [
        f"{t.shape[0] / num_blocks:g}x{list(t.shape[1:])}:{list(t.stride())} {t.dtype}"
        for t in tensors
    ]
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:8]
    form = " ".join(filter(None, (type(spec).__name__, kernel, digest)))
    return LayerGeometry(name, OWN, form, 1, block_tokens, 1, 1, page_bytes)


def _attention(
    name: str,
    spec: AttentionSpec,
    kernel: str,
    tensor: torch.Tensor,
    num_blocks: int,
    block_tokens: int,
) -> LayerGeometry | None:
    """Describe an attention layer, if its kernel's way of splitting is known."""
    kernel_blocks, rest = divmod(tensor.shape[0], num_blocks)
    heads, tokens = tensor.shape[1], tensor.shape[2]
    if rest or kernel_blocks * tokens != block_tokens or heads != spec.num_kv_heads:
        return None
    split = COPIES if isinstance(spec, MLAAttentionSpec) else HEADS
    if split == COPIES and heads != 1:
        return None
    item = tensor.element_size()
    step = dict(zip((KERNEL_BLOCK, HEAD, TOKEN), (s * item for s in tensor.stride()), strict=False))
    content = tensor.shape[3] * item
    if tensor.stride(3) != 1:
        return None
    sizes = {KERNEL_BLOCK: kernel_blocks, HEAD: heads, TOKEN: tokens}
    by_token = split == HEADS and kernel in BY_TOKEN and not _is_quantized(spec)
    if not by_token:
        if split == HEADS and kernel not in BY_HEAD:
            return None
        if tokens > 1 and step[TOKEN] != content:
            return None  # a head's tokens are not contiguous
        content *= tokens
        sizes[TOKEN] = 1
    order = _order(sizes, step, content)
    if order is None:
        return None
    form = f"{kernel} {tensor.dtype}"
    return LayerGeometry(
        name, split, form, kernel_blocks, tokens, heads, sizes[TOKEN], content, order
    )


def _is_quantized(spec: AttentionSpec) -> bool:
    """True if the kernel may store scales beside the numbers, at positions of its choice."""
    mode = getattr(spec, "kv_quant_mode", None)
    return bool(mode) and getattr(mode, "name", "NONE") != "NONE"


def _order(sizes: Mapping[str, int], step: Mapping[str, int], unit: int) -> str | None:
    """The axes from the largest stride to the smallest; ``None`` if they overlap.

    Registration (``offload.layout.registration``) keeps this order and closes the gaps, so it
    determines the position of a unit in a slot. Axes of length one may have any stride; they come
    first.
    """
    single = [axis for axis in sizes if sizes[axis] == 1]
    several = sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: -step[axis])
    least = unit
    for axis in reversed(several):
        if step[axis] < least:
            return None
        least = step[axis] * sizes[axis]
    return "".join(single + several)

"""Turns KV cache tensors into byte regions: the addresses of every layer's pages.

Shapes are not interpreted: MLA and GQA tensors use ``shape[-2]`` differently, and a kernel may
divide a block into several kernel blocks. Dimension 0 counts blocks or kernel blocks; the other
dimensions are the page, which its strides divide into contiguous ranges. In most layouts a page is
one range; where the head dimension precedes the block dimension in memory, it is one range per
head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import torch

from offload.errors import PageSizeError
from tiers.copy.base import GroupRegions, PageRegion

LayerTensors: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""One tensor, or the state tensors of a recurrent layer; blocks are the outermost dimension."""


@dataclass(frozen=True, slots=True)
class GroupCaches:
    """The tensors of one group. ``page_bytes`` gives the size of a page without padding, by layer;
    for a layer without an entry, it is the size that the layer's tensors hold."""

    group: int
    chunk_blocks: int
    layers: Mapping[str, LayerTensors]
    page_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registration:
    """Registered KV caches. ``tensors`` keeps the memory alive that the addresses point into."""

    num_blocks: int
    groups: tuple[GroupRegions, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        """The device of the KV caches."""
        return self.tensors[0].device


@dataclass(frozen=True, slots=True)
class PageShape:
    """The pages of one tensor: block ``b`` is ``run_bytes`` bytes at
    ``address + b * block_stride + offset`` for each of ``offsets``."""

    address: int
    block_stride: int
    run_bytes: int
    offsets: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this tensor."""
        return self.run_bytes * len(self.offsets)


def register_kv_caches(num_blocks: int, groups: Sequence[GroupCaches]) -> Registration:
    """Find the regions of all layers.

    Raises ``PageSizeError`` naming every layer whose pages do not fit its tensor or its storage.
    """
    problems: list[str] = []
    registered = tuple(_register_group(caches, num_blocks, problems) for caches in groups)
    if problems:
        noun = "layer does" if len(problems) == 1 else "layers do"
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise PageSizeError(f"kvtiers: {len(problems)} {noun} not match the KV caches:\n{lines}")
    tensors = [t for caches in groups for layer in caches.layers.values() for t in as_list(layer)]
    return Registration(num_blocks, registered, tuple(tensors))


def as_list(tensors: LayerTensors) -> list[torch.Tensor]:
    """The tensors of a layer as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _register_group(caches: GroupCaches, num_blocks: int, problems: list[str]) -> GroupRegions:
    """The regions of one group. Layers that share their pages form one region, which is copied
    once."""
    regions: dict[tuple[int, int, int], PageRegion] = {}
    for layer, tensors in caches.layers.items():
        try:
            found = _layer_regions(layer, as_list(tensors), num_blocks, caches.page_bytes)
        except PageSizeError as error:
            problems.append(f"group {caches.group}, layer {layer}: {error}")
            continue
        for region in found:
            page = (region.address, region.block_stride, region.page_bytes)
            regions.setdefault(page, region)
    return GroupRegions(caches.group, caches.chunk_blocks, tuple(regions.values()))


def _layer_regions(
    layer: str, tensors: list[torch.Tensor], num_blocks: int, expected: Mapping[str, int]
) -> list[PageRegion]:
    shapes = [page_shape(tensor, num_blocks) for tensor in tensors]
    shapes = _without_padding(shapes, expected.get(layer, 0))
    return [
        PageRegion(layer, shape.address + offset, shape.block_stride, shape.run_bytes)
        for shape in shapes
        for offset in shape.offsets
    ]


def _without_padding(shapes: list[PageShape], page_bytes: int) -> list[PageShape]:
    """Cut off padding at the end of a page that is one run; any other difference is an error."""
    found = sum(shape.page_bytes for shape in shapes)
    if page_bytes in (0, found):
        return shapes
    if page_bytes < found and len(shapes) == 1 and len(shapes[0].offsets) == 1:
        only = shapes[0]
        return [PageShape(only.address, only.block_stride, page_bytes, only.offsets)]
    raise PageSizeError(f"its page is {page_bytes} bytes, its tensors hold {found} bytes per block")


def page_shape(tensor: torch.Tensor, num_blocks: int) -> PageShape:
    """The pages of one tensor. Raises ``PageSizeError`` if dimension 0 does not count blocks or
    kernel blocks, or if a page lies outside the storage."""
    if num_blocks < 1 or tensor.dim() < 1 or tensor.numel() == 0:
        raise PageSizeError(f"shape {tuple(tensor.shape)} holds none of the {num_blocks} blocks")
    if tensor.shape[0] % num_blocks:
        raise PageSizeError(
            f"shape {tuple(tensor.shape)} has {tensor.shape[0]} kernel blocks, which is not a "
            f"multiple of the {num_blocks} blocks"
        )
    item = tensor.element_size()
    kernel_blocks = tensor.shape[0] // num_blocks
    strides = [stride * item for stride in tensor.stride()]
    dims = [(kernel_blocks, strides[0]), *zip(tensor.shape[1:], strides[1:], strict=True)]
    run, offsets = _runs(dims, item)
    shape = PageShape(tensor.data_ptr(), kernel_blocks * strides[0], run, offsets)
    _check_inside(shape, tensor, num_blocks)
    return shape


def _runs(dims: list[tuple[int, int]], item: int) -> tuple[int, tuple[int, ...]]:
    """Merge dimensions (size, byte stride) into runs of adjacent bytes; the other dimensions become
    offsets."""
    run = item
    outer: list[range] = []
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride == run and not outer:
            run *= size
        else:
            outer.append(range(0, size * stride, stride))
    return run, tuple(sorted(sum(steps) for steps in product(*outer)))


def _check_inside(shape: PageShape, tensor: torch.Tensor, num_blocks: int) -> None:
    storage = tensor.untyped_storage()
    first = shape.address - storage.data_ptr()
    last = (num_blocks - 1) * shape.block_stride + shape.offsets[-1] + shape.run_bytes
    if first < 0 or first + last > storage.nbytes():
        raise PageSizeError(
            f"bytes [{first}, {first + last}) of {num_blocks} blocks with stride "
            f"{shape.block_stride} lie outside its storage of {storage.nbytes()} bytes"
        )

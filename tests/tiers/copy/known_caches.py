"""KV caches in host memory with known bytes, and a slow, obviously right copy to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiers.copy.base import CopyBatch, GroupRegions, PageRegion

Bytes = npt.NDArray[np.uint8]


@dataclass
class Cache:
    """One storage that holds ``num_blocks`` blocks of one group. Keeps its memory alive."""

    storage: Bytes
    regions: GroupRegions
    num_blocks: int

    def page(self, region: PageRegion, block: int) -> Bytes:
        """The bytes of one layer for one block, without a copy."""
        start = region.address - self.storage.ctypes.data + block * region.block_stride
        return self.storage[start : start + region.page_bytes]

    def block(self, block: int) -> Bytes:
        """All pages of a block one after the other, as they are stored in a slot (a copy)."""
        return np.concatenate([self.page(region, block) for region in self.regions.regions])

    def chunk(self, blocks: Sequence[int]) -> Bytes:
        """The blocks of a chunk one after the other (a copy)."""
        return np.concatenate([self.block(block) for block in blocks])


def separate_layers(
    pages: Sequence[int],
    num_blocks: int,
    *,
    group: int = 0,
    chunk_blocks: int = 1,
    padding: int = 0,
    seed: int = 0,
) -> Cache:
    """Each layer has its own part of the storage: ``[layer][block][page + padding]``."""
    strides = [page + padding for page in pages]
    storage = random_bytes(sum(strides) * num_blocks, seed)
    address = storage.ctypes.data
    regions = []
    for layer, (page, stride) in enumerate(zip(pages, strides, strict=True)):
        regions.append(PageRegion(f"layer.{layer}", address, stride, page))
        address += stride * num_blocks
    return Cache(storage, GroupRegions(group, chunk_blocks, tuple(regions)), num_blocks)


def contiguous_blocks(
    pages: Sequence[int],
    num_blocks: int,
    *,
    group: int = 0,
    chunk_blocks: int = 1,
    padding: int = 0,
    seed: int = 0,
) -> Cache:
    """All layers of a block are adjacent: ``[block][layer][page]``, ``padding`` after a block."""
    stride = sum(pages) + padding
    storage = random_bytes(stride * num_blocks, seed)
    address = storage.ctypes.data
    regions = []
    for layer, page in enumerate(pages):
        regions.append(PageRegion(f"layer.{layer}", address, stride, page))
        address += page
    return Cache(storage, GroupRegions(group, chunk_blocks, tuple(regions)), num_blocks)


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def batch(slots: Sequence[int], blocks: Sequence[Sequence[int]], group: int = 0) -> CopyBatch:
    return CopyBatch(
        group=group,
        blocks=np.array(blocks, dtype=np.int64).reshape(
            len(slots), len(blocks[0]) if blocks else 1
        ),
        slots=np.array(slots, dtype=np.int64),
    )

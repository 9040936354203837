"""Turns batches of chunks into lists of plain copies: which bytes go where.

The module does arithmetic on addresses, for all copy engines. It is the only place that checks that
a copy stays inside its memory: a block or slot out of range is a ``TransferError``, never a stray
write. This module knows nothing about streams, threads or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tiers.copy.base import CopyBatch, GroupRegions, PageRegion, TransferError

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Plain copies: ``sizes[i]`` bytes between ``blocks[i]`` (an address in the KV cache) and
    ``slots[i]`` (an address in the slab). Shapes ``[n]`` each; the direction is the caller's."""

    blocks: Int64s
    slots: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.sizes)

    def where(self, wanted: npt.NDArray[np.bool_]) -> Descriptors:
        """Return the copies for which ``wanted`` ``[n]`` is True."""
        return Descriptors(self.blocks[wanted], self.slots[wanted], self.sizes[wanted])

    @property
    def nbytes(self) -> int:
        """Bytes that all copies move together."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class CopyShape:
    """The copies per block of a group, the size of the smallest, and the largest power of two that
    divides every address and size involved."""

    copies_per_block: int
    smallest_bytes: int
    alignment: int


@dataclass(frozen=True, slots=True)
class _GroupLayout:
    """One group with its regions merged. Shapes ``[regions]``; ``slot_offsets`` are within a
    block's part of the slot. ``dense``: consecutive blocks are adjacent in memory too."""

    chunk_blocks: int
    block_bytes: int
    dense: bool
    addresses: Int64s
    strides: Int64s
    sizes: Int64s
    slot_offsets: Int64s


class DescriptorBuilder:
    """Turns batches into ``Descriptors`` for one slab and one set of groups.

    ``num_blocks`` limits block ids (vLLM's ``kv_cache_config.num_blocks``); without it only
    negative ids are recognized, and the caller guarantees that the others are valid.

    Raises ``ValueError`` when a group's chunk is larger than a slot, a group is given twice, or a
    group or one of its layers has no bytes.
    """

    def __init__(
        self,
        groups: Sequence[GroupRegions],
        *,
        slab_address: int,
        slot_stride: int,
        slot_count: int,
        num_blocks: int | None = None,
    ) -> None:
        self._slab_address = slab_address
        self._slot_stride = slot_stride
        self._slot_count = slot_count
        self._num_blocks = num_blocks
        self._layouts: dict[int, _GroupLayout] = {}
        for group in groups:
            if group.group in self._layouts:
                raise ValueError(f"group {group.group} is given twice")
            pages = [region.page_bytes for region in group.regions]
            if min(pages, default=0) < 1 or group.chunk_blocks < 1:
                raise ValueError(f"group {group.group} has no bytes to copy, or a layer has none")
            if group.chunk_bytes > slot_stride:
                raise ValueError(
                    f"a chunk of group {group.group} has {group.chunk_bytes} bytes, "
                    f"but a slot of the slab has only {slot_stride}"
                )
            self._layouts[group.group] = _layout(group)

    def shape(self, group: int) -> CopyShape:
        """Return the shape of a group's copies after merging."""
        layout = self._layouts[group]
        bits = self._slab_address | self._slot_stride | layout.block_bytes
        for numbers in (layout.addresses, layout.strides, layout.sizes, layout.slot_offsets):
            bits |= int(np.bitwise_or.reduce(numbers))
        return CopyShape(
            copies_per_block=len(layout.sizes),
            smallest_bytes=int(layout.sizes.min()),
            alignment=bits & -bits,
        )

    def build(self, batches: Sequence[CopyBatch]) -> Descriptors:
        """Return all copies of these batches. Raises ``TransferError`` for anything out of
        range."""
        parts = [self._build_one(batch) for batch in batches]
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, dtype=np.int64)
        return Descriptors(
            blocks=np.concatenate([empty, *(part.blocks for part in parts)]),
            slots=np.concatenate([empty, *(part.slots for part in parts)]),
            sizes=np.concatenate([empty, *(part.sizes for part in parts)]),
        )

    def _build_one(self, batch: CopyBatch) -> Descriptors:
        layout = self._layouts.get(batch.group)
        if layout is None:
            raise TransferError(f"group {batch.group} is not registered with the copy engine")
        blocks = np.asarray(batch.blocks, dtype=np.int64)
        slots = np.asarray(batch.slots, dtype=np.int64)
        self._check(batch.group, layout, blocks, slots)
        first_blocks, lengths, cells = _runs(blocks, layout.dense)
        slot_bases = (
            self._slab_address
            + slots[cells // layout.chunk_blocks] * self._slot_stride
            + (cells % layout.chunk_blocks) * layout.block_bytes
        )
        return Descriptors(
            blocks=(layout.addresses + first_blocks[:, None] * layout.strides).ravel(),
            slots=(slot_bases[:, None] + layout.slot_offsets).ravel(),
            sizes=(lengths[:, None] * layout.sizes).ravel(),
        )

    def _check(self, group: int, layout: _GroupLayout, blocks: Int64s, slots: Int64s) -> None:
        expected = (len(slots), layout.chunk_blocks)
        if slots.ndim != 1 or blocks.shape != expected:
            raise TransferError(
                f"group {group}: blocks of shape {blocks.shape} for slots of shape {slots.shape}, "
                f"expected {expected}"
            )
        if len(slots) == 0:
            return
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= self._slot_count:
            raise TransferError(
                f"group {group}: slots {low} to {high} requested, the slab has {self._slot_count}"
            )
        highest = int(blocks.max())
        if self._num_blocks is not None and highest >= self._num_blocks:
            raise TransferError(
                f"group {group}: block {highest} requested, the KV cache has {self._num_blocks}"
            )


def _layout(group: GroupRegions) -> _GroupLayout:
    regions = merge_adjacent(group.regions)
    sizes = np.array([region.page_bytes for region in regions], dtype=np.int64)
    return _GroupLayout(
        chunk_blocks=group.chunk_blocks,
        block_bytes=group.block_bytes,
        dense=len(regions) == 1 and regions[0].block_stride == regions[0].page_bytes,
        addresses=np.array([region.address for region in regions], dtype=np.int64),
        strides=np.array([region.block_stride for region in regions], dtype=np.int64),
        sizes=sizes,
        slot_offsets=np.cumsum(sizes) - sizes,
    )


def merge_adjacent(regions: Sequence[PageRegion]) -> list[PageRegion]:
    """Join regions that follow each other both in a slot and in every block, so that a
    block-contiguous layout becomes one copy per block."""
    merged: list[PageRegion] = []
    for region in regions:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride == region.block_stride
            and last.address + last.page_bytes == region.address
        ):
            merged[-1] = PageRegion(
                layer=last.layer,
                address=last.address,
                block_stride=last.block_stride,
                page_bytes=last.page_bytes + region.page_bytes,
            )
        else:
            merged.append(region)
    return merged


def _runs(blocks: Int64s, dense: bool) -> tuple[Int64s, Int64s, Int64s]:
    """Cut the wanted cells of ``blocks`` ``[n, chunk_blocks]`` into runs that are copied as one.

    Returns the first block, the number of blocks and the flat cell index of each run. A run is
    longer than one cell only within a chunk (slots are apart) and where consecutive blocks are
    adjacent in memory (``dense``).
    """
    wanted = blocks >= 0
    starts = wanted
    if dense and blocks.shape[1] > 1:
        starts = wanted.copy()
        follows = (blocks[:, 1:] == blocks[:, :-1] + 1) & wanted[:, :-1]
        starts[:, 1:] &= ~follows
    cells = np.flatnonzero(starts)
    flat = blocks.ravel()
    if starts is wanted:
        return flat[cells], np.ones_like(cells), cells
    lengths = np.add.reduceat(wanted.ravel(), cells, dtype=np.int64) if len(cells) else cells
    return flat[cells], lengths, cells

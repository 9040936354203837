"""The chunks of a load by columns, and what travels of them.

A long prompt's load has thousands of chunks. They are planned and pickled on vLLM's scheduler
thread, and unpickled on its model runner's: flat lists cost a fraction there of what an object per
chunk does. Rows are made by whoever carries the load out, on a thread of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from offload.keys import pack_keys, unpack_keys

Row = tuple[bytes, int, tuple[int, ...], int, int]


class Columns(NamedTuple):
    """Key, group, GPU blocks, slot and tier of each chunk, as in ``offload.plans.LoadItem``."""

    keys: Sequence[bytes]
    groups: Sequence[int]
    blocks: Sequence[tuple[int, ...]]
    slots: Sequence[int]
    tiers: Sequence[int]

    def rows(self) -> Iterator[Row]:
        """One tuple per chunk."""
        return zip(*self, strict=True)

    def pack(self) -> Packed:
        """The same in fewer objects."""
        keys, key_bytes = pack_keys(self.keys)
        widths = list(set(map(len, self.blocks)))
        if len(widths) != 1:
            widths = list(map(len, self.blocks))
        flat = list(chain.from_iterable(self.blocks))
        return Packed(keys, key_bytes, self.groups, flat, widths, self.slots, self.tiers)


class Packed(NamedTuple):
    """``Columns`` with all keys in one piece and all blocks in one list. ``key_bytes`` and
    ``widths`` are their lengths: of each, or one number if all are equal."""

    keys: bytes
    key_bytes: Sequence[int]
    groups: Sequence[int]
    blocks: Sequence[int]
    widths: Sequence[int]
    slots: Sequence[int]
    tiers: Sequence[int]

    def unpack(self) -> Columns:
        """What was packed."""
        keys = unpack_keys(self.keys, self.key_bytes)
        widths = list(self.widths)
        if len(widths) == 1:
            widths *= len(self.groups)
        ends = accumulate(widths)
        blocks = [tuple(self.blocks[e - w : e]) for e, w in zip(ends, widths, strict=True)]
        return Columns(keys, self.groups, blocks, self.slots, self.tiers)

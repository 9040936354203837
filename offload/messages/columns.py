"""The chunks of a load by columns, and what travels of them.

A long prompt's load has thousands of chunks. They are planned and pickled on vLLM's scheduler
thread, and unpickled on its model runner's: flat lists cost a fraction there of what an object per
chunk does. The rank that carries the load out builds rows, on our thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from offload.layout.keys import pack_keys, unpack_keys

Row = tuple[bytes, int, tuple[int, ...], int, int]


class Columns(NamedTuple):
    """Key, group, GPU blocks, slot and tier of each chunk, as in
    ``offload.messages.plan.LoadItem``. The blocks of all are in one list; ``widths`` says how many
    each has, in one number if all have as many."""

    keys: Sequence[bytes]
    groups: Sequence[int]
    blocks: Sequence[int]
    widths: Sequence[int]
    slots: Sequence[int]
    tiers: Sequence[int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Columns:
        """By columns what was given by rows."""
        keys, groups, blocks, slots, tiers = map(list, zip(*rows, strict=True))
        flat = list(chain.from_iterable(blocks))
        return cls(keys, groups, flat, one_width(list(map(len, blocks))), slots, tiers)

    def rows(self) -> Iterator[Row]:
        """One tuple per chunk."""
        widths = list(self.widths)
        if len(widths) == 1:
            widths *= len(self.groups)
        ends = accumulate(widths)
        blocks = [tuple(self.blocks[e - w : e]) for e, w in zip(ends, widths, strict=True)]
        return zip(self.keys, self.groups, blocks, self.slots, self.tiers, strict=True)

    def pack(self) -> Packed:
        """The same in fewer objects."""
        return Packed(*pack_keys(self.keys), *self[1:])


NO_CHUNKS = Columns((), (), (), (), (), ())


def one_width(widths: list[int]) -> list[int]:
    """One number where all are equal."""
    return widths[:1] if len(set(widths)) == 1 else widths


class Packed(NamedTuple):
    """``Columns`` with all keys in one piece. ``key_bytes`` are their lengths: of each, or one
    number if all are equal."""

    keys: bytes
    key_bytes: Sequence[int]
    groups: Sequence[int]
    blocks: Sequence[int]
    widths: Sequence[int]
    slots: Sequence[int]
    tiers: Sequence[int]

    def unpack(self) -> Columns:
        """The columns that were packed."""
        return Columns(unpack_keys(self.keys, self.key_bytes), *self[2:])

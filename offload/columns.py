"""Rows of (key, group, blocks, slot, tier) as a few byte strings.

A long prompt's load has thousands of rows. They are packed on vLLM's scheduler thread and travel
through its pickles; columns of machine numbers cost a twentieth of what rows of objects do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

Row = tuple[bytes, int, tuple[int, ...], int, int]


def pack(rows: Sequence[Row]) -> tuple[bytes, ...]:
    """Keys one after the other, then native 64-bit numbers: lengths of keys, groups, lengths of
    blocks, blocks, slots, tiers."""
    if not rows:
        return ()
    keys, groups, blocks, slots, tiers = zip(*rows, strict=True)
    numbers: list[Any] = [
        map(len, keys),
        groups,
        map(len, blocks),
        chain.from_iterable(blocks),
        slots,
        tiers,
    ]
    return b"".join(keys), *(array("q", column).tobytes() for column in numbers)


def unpack(columns: Sequence[bytes]) -> Iterator[Row]:
    """The rows again."""
    if not columns:
        return iter(())
    keys = columns[0]
    key_sizes, groups, block_counts, blocks, slots, tiers = map(_numbers, columns[1:])
    return zip(
        _cut(keys, key_sizes),
        groups,
        map(tuple, _cut(blocks, block_counts)),
        slots,
        tiers,
        strict=True,
    )


def _numbers(raw: bytes) -> Sequence[int]:
    found = array("q")
    found.frombytes(raw)
    return found


def _cut(whole: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """``whole`` in pieces of these sizes."""
    ends = list(accumulate(sizes))
    return map(whole.__getitem__, map(slice, [0, *ends[:-1]], ends))

"""The columns for policies contain the facts of each chunk."""

from __future__ import annotations

import random

import pytest

from offload.index.chunk_batch import (
    PAIR_TOKENS,
    UNKNOWN,
    ChunkBatch,
    GroupInfo,
    LazyEntryInfos,
    RequestOrigin,
    chosen,
    joined,
    sized,
    sizes_of,
)
from offload.index.request_options import RequestHints
from policies.base import EntryInfo, hints_among

HINTED = RequestOrigin(b"salt", RequestHints({"session": 3}, {}, 100.0))
PINNED = RequestOrigin(b"salt", RequestHints({}, {}, 100.0))


def entry_info(info: GroupInfo, origin: RequestOrigin, depth: int, size: int) -> EntryInfo:
    """The facts of one chunk, computed in the simplest way."""
    slope = info.chunk_tokens / PAIR_TOKENS if info.kind == "full" else 0.0
    cost = info.chunk_tokens + slope * max(depth - info.chunk_tokens / 2, 0.0)
    hints = origin.hints.of_chunk(depth) if origin.hints.pinned_tokens else origin.hints.stored
    return EntryInfo(2, info.kind, depth, size, cost, origin.salt, hints)


@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("origin", [UNKNOWN, HINTED, PINNED])
def test_columns_equal_single_facts(count: int, kind: str, origin: RequestOrigin) -> None:
    info = GroupInfo(kind, 16, (300,))
    depths = range(16, 16 * (count + 1), 16)
    run = ChunkBatch([b"%d" % n for n in depths], 2, list(depths), depths, origin)
    found = info.entries(run, 1)
    naive = [entry_info(info, origin, depth, 1) for depth in depths]
    assert list(found) == naive
    assert [found[n] for n in range(count)] == naive
    assert list(hints_among(found)) == list(hints_among(naive))
    assert list(hints_among(naive)) == [info.hints for info in naive if info.hints]
    assert sizes_of(found) == sizes_of(naive) == [1] * count
    assert list(sized(found, 300)) == sized(naive, 300)
    assert list(found[1:3]) == naive[1:3]
    assert list(found[::-1]) == naive[::-1]
    rng = random.Random(count)
    flags = [rng.random() < 0.5 for _ in range(count)]
    assert list(chosen(found, flags)) == chosen(naive, flags)
    parts = [found[:3], found[3:]]
    assert isinstance(joined(parts), LazyEntryInfos), "no objects are created from them"
    assert list(joined(parts)) == naive
    others = info.entries(ChunkBatch([b"x"], 2, [0], [99], RequestOrigin(b"other")), 1)
    assert list(joined([found, others])) == [*naive, *others]
    assert list(joined([])) == []

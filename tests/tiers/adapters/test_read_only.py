"""The read-only tier over other engines' stores; the sources here are dicts that can fail or
hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tiers.adapters.read_only import ReadOnlyTier, SharedReadOnlyTier, SourceKey
from tiers.base import Buffer, ReadOutcome, TierIoError
from tiers.testing import aligned, all_keys, fetch

SIZE = 4096


class Shelf:
    """A source: ``byte`` fills every payload; the keys count as used in their order."""

    def __init__(self, byte: int, *keys: bytes) -> None:
        self.byte, self.held = byte, list(keys)
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()
        self.closed = 0
        self.threads: set[int] = set()

    def keys(self) -> list[SourceKey]:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return [SourceKey(key, self.byte * 100 + n, SIZE) for n, key in enumerate(self.held)]

    def read(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[ReadOutcome]:
        return [self._read(key, data) for key, data in zip(keys, into, strict=True)]

    def _read(self, key: bytes, into: Buffer) -> ReadOutcome:
        self.threads.add(threading.get_ident())
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        if key not in self.held:
            return ReadOutcome.MISS
        into[:] = self.byte
        return ReadOutcome.OK

    def have(self, keys: Sequence[bytes]) -> list[bool]:
        self.threads.add(threading.get_ident())
        return [key in self.held for key in keys]

    def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def over(*shelves: Shelf, asked: bool = False) -> AsyncIterator[ReadOnlyTier]:
    tier = (SharedReadOnlyTier if asked else ReadOnlyTier)(lambda: shelves)
    try:
        await tier.open()
        yield tier
    finally:
        await tier.aclose()
        await tier.aclose()
        assert [shelf.closed for shelf in shelves] == [1] * len(shelves)


async def test_the_first_source_is_used_and_uses_are_in_order() -> None:
    late, early = Shelf(2, b"b", b"c"), Shelf(1, b"a", b"b")
    async with over(late, early) as tier:
        assert [key for key, _ in await all_keys(tier)] == [b"a", b"b", b"c"]
        for key, byte in ((b"a", 1), (b"b", 2), (b"c", 2)):
            outcome, payload = await fetch(tier, key, SIZE)
            assert outcome is ReadOutcome.OK
            assert (payload == byte).all()
        assert (await fetch(tier, b"z", SIZE))[0] is ReadOutcome.MISS
        assert (await fetch(tier, b"a", SIZE * 2))[0] is ReadOutcome.CORRUPT
        late.held.remove(b"c")
        assert (await fetch(tier, b"c", SIZE))[0] is ReadOutcome.MISS
        assert tier.stats() == {"records": 3, "reads": 6, "misses": 2, "write_attempts": 0}
    assert late.threads == early.threads
    assert threading.get_ident() not in late.threads


async def test_a_queried_tier_finds_records_stored_later() -> None:
    first, second = Shelf(1, b"a"), Shelf(2, b"b")
    async with over(first, second, asked=True) as tier:
        assert await all_keys(tier) == []
        assert await tier.present([b"a", b"b", b"c"]) == [True, True, False]
        second.held.append(b"c")
        assert await tier.present([b"c"]) == [True]
        for key, byte in ((b"a", 1), (b"c", 2)):
            outcome, payload = await fetch(tier, key, SIZE)
            assert outcome is ReadOutcome.OK
            assert (payload == byte).all()
        first.held.remove(b"a")
        assert (await fetch(tier, b"a", SIZE))[0] is ReadOutcome.MISS
        await tier.delete([b"b"])  # it was damaged, and is still there
        assert await tier.present([b"b", b"c"]) == [False, True]
        await tier.reset(1)
        assert await tier.present([b"b", b"c"]) == [False, False]
        assert (await fetch(tier, b"c", SIZE))[0] is ReadOutcome.MISS
        assert tier.stats() == {"records": 0, "reads": 4, "misses": 2, "write_attempts": 0}
    assert first.threads == second.threads


async def test_a_broken_source_loses_only_its_records() -> None:
    broken, good = Shelf(1, b"a"), Shelf(2, b"b")
    broken.error = RuntimeError("no database")
    async with over(broken, good) as tier:
        assert [key for key, _ in await all_keys(tier)] == [b"b"]
        assert (await fetch(tier, b"b", SIZE))[0] is ReadOutcome.OK
        good.error = RuntimeError("gone")
        with pytest.raises(TierIoError, match="gone"):
            await fetch(tier, b"b", SIZE)


async def test_a_cancelled_read_ends_when_its_buffer_is_no_longer_written() -> None:
    slow = Shelf(7, b"a")
    async with over(slow) as tier:
        slow.go.clear()
        into = aligned(SIZE)
        into[:] = 0
        reading = asyncio.ensure_future(tier.read([b"a"], [into]))
        await asyncio.to_thread(slow.began.wait, 30)
        reading.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reading.done()
        slow.go.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert np.unique(into).tolist() == [7]

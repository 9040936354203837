"""The contract of a tier as a test class. Inherit from it and define how to create your tier:

    class TestMyTier(TierContract):
        def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
            return MyTier(folder, capacity_bytes)

It needs pytest and pytest-asyncio in ``auto`` mode. Every test opens a tier in a fresh folder. If
the result of ``open`` says that the tier is persistent, the tests also reopen it by calling
``make_tier`` again.

Owns the conformance kit for tiers, and faults to plant in them.

Must not know the tiers that it tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tiers.base import ReadOutcome, SharedTier, StoredKey, Tier, TierClosedError, TierInfo
from tiers.testing.records import (
    FULL,
    KIB,
    MIB,
    OK,
    aligned,
    all_keys,
    assert_holds,
    assert_misses,
    fetch,
    key_of,
    payload_of,
    put,
)

__all__ = [
    "FULL",
    "KIB",
    "MIB",
    "OK",
    "TierContract",
    "aligned",
    "all_keys",
    "assert_holds",
    "assert_misses",
    "fetch",
    "key_of",
    "payload_of",
    "put",
]


class TierContract:
    """The contract of every tier. Override ``make_tier``. For a slow medium, reduce the sizes."""

    payload_bytes = 16 * KIB
    capacity_bytes = 16 * MIB
    is_listed = True
    """True if ``keys`` lists all records, and the tier keeps track of capacity and recency. False
    for a store that evicts by itself."""

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        """Return a tier over ``folder``, not yet open, that can hold about ``capacity_bytes``."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(
        self, folder: Path, capacity_bytes: int | None = None
    ) -> AsyncIterator[tuple[Tier, TierInfo]]:
        """Open a new tier over ``folder`` and close it at the end."""
        tier = self.make_tier(folder / "tier", capacity_bytes or self.capacity_bytes)
        try:
            yield tier, await tier.open()
        finally:
            await tier.aclose()

    async def listed(self, tier: Tier) -> list[StoredKey] | None:
        """Return the records that the tier lists; ``None`` if it does not list them."""
        found = await all_keys(tier)
        return found if self.is_listed else None

    def skip_unless_listed(self) -> None:
        """Skip the test unless the tier lists all of its records."""
        if not self.is_listed:
            pytest.skip("the store manages its capacity itself")

    async def assert_listed(self, tier: Tier, *numbers: int) -> None:
        """Assert that the tier lists exactly the keys with these numbers, oldest first."""
        found = await self.listed(tier)
        assert found is None or [stored.key for stored in found] == list(map(key_of, numbers))

    # -- one record ------------------------------------------------------------------------

    async def test_a_new_tier_is_empty(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, info):
            assert (info.used_bytes, info.record_count) == (0, 0)
            assert info.capacity_bytes > 0
            await self.assert_listed(tier)
            await assert_misses(tier, [key_of(1)], self.payload_bytes)

    async def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(40)]
        async with self.opened(tmp_path) as (tier, _):
            assert await put(tier, keys, self.payload_bytes) == [OK] * len(keys)
            await assert_holds(tier, keys, self.payload_bytes)
            await assert_holds(tier, keys[::-3], self.payload_bytes)

    @pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097, 10_000, 65_536, 1_100_001])
    @pytest.mark.parametrize("offset", [0, 1, 64])
    async def test_any_length_at_any_address(
        self, tmp_path: Path, length: int, offset: int
    ) -> None:
        data = aligned(length + offset)[offset:]
        data[:] = payload_of(key_of(7), length)
        into = aligned(length + offset)[offset:]
        into[:] = 0
        async with self.opened(tmp_path) as (tier, _):
            assert await tier.write([key_of(7)], [data]) == [OK]
            assert await tier.read([key_of(7)], [into]) == [ReadOutcome.OK]
        assert np.array_equal(into, data)

    async def test_mixed_lengths_in_one_call(self, tmp_path: Path) -> None:
        lengths = [4096 * (1 + n % 5) + (n % 3) for n in range(50)]
        keys = [key_of(n) for n in range(50)]
        data = [payload_of(key, size) for key, size in zip(keys, lengths, strict=True)]
        into = [aligned(size) for size in lengths]
        async with self.opened(tmp_path) as (tier, _):
            assert await tier.write(keys, data) == [OK] * 50
            assert await tier.read(keys, into) == [ReadOutcome.OK] * 50
            found = await self.listed(tier)
            assert found is None or found == list(zip(keys, lengths, strict=True))
        for wrote, got in zip(data, into, strict=True):
            assert np.array_equal(wrote, got)

    async def test_keys_of_many_lengths(self, tmp_path: Path) -> None:
        keys = [bytes([n % 256]) * n for n in (1, 2, 36, 64, 255, 511)]
        async with self.opened(tmp_path) as (tier, _):
            assert await put(tier, keys, 5000) == [OK] * len(keys)
            await assert_holds(tier, keys, 5000)

    async def test_a_present_key_stays_as_it_is(self, tmp_path: Path) -> None:
        key = key_of(1)
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, [key], self.payload_bytes)
            other = payload_of(key, self.payload_bytes, version=1)
            assert await tier.write([key], [other]) == [OK]
            await assert_holds(tier, [key], self.payload_bytes)

    async def test_a_key_twice_in_one_call(self, tmp_path: Path) -> None:
        key = key_of(1)
        async with self.opened(tmp_path) as (tier, _):
            assert await put(tier, [key, key], self.payload_bytes) == [OK, OK]
            await self.assert_listed(tier, 1)
            await assert_holds(tier, [key, key], self.payload_bytes)

    async def test_another_length_is_corrupt(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, [key_of(1)], self.payload_bytes)
            for length in (self.payload_bytes - 1, self.payload_bytes + 1, 1):
                outcome, _data = await fetch(tier, key_of(1), length)
                assert outcome is ReadOutcome.CORRUPT

    async def test_empty_calls(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, _):
            assert await tier.write([], []) == []
            assert await tier.read([], []) == []
            await tier.delete([])
            await tier.touch([])

    async def test_misuse_is_a_value_error(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, _):
            for key, length in ((b"", 10), (b"x" * 512, 10), (key_of(1), 0)):
                with pytest.raises(ValueError):
                    await tier.write([key], [aligned(length)])
            with pytest.raises(ValueError):
                await tier.write([key_of(1), key_of(2)], [aligned(10)])
            await self.assert_listed(tier)

    # -- deleting, capacity ----------------------------------------------------------------

    async def test_deleted_keys_are_misses(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(10)]
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, keys, self.payload_bytes)
            await tier.delete([*keys[::2], key_of(999)])
            await assert_misses(tier, keys[::2], self.payload_bytes)
            await assert_holds(tier, keys[1::2], self.payload_bytes)
            await self.assert_listed(tier, *range(1, 10, 2))

    async def test_capacity_is_hard_and_full_is_an_outcome(self, tmp_path: Path) -> None:
        self.skip_unless_listed()
        async with self.opened(tmp_path, self.capacity_bytes) as (tier, info):
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            keys = [key_of(n) for n in range(fits + 5)]
            outcomes = []
            for start in range(0, len(keys), 64):
                outcomes += await put(tier, keys[start : start + 64], self.payload_bytes)
            assert outcomes == [OK] * fits + [FULL] * 5
            await assert_holds(tier, keys[:fits:17], self.payload_bytes)
            await assert_misses(tier, keys[fits:], self.payload_bytes)

            await tier.delete(keys[:10])
            assert await put(tier, keys[fits:], self.payload_bytes) == [OK] * 5
            await assert_holds(tier, keys[fits:], self.payload_bytes)

    async def test_space_of_deleted_records_is_used_again(self, tmp_path: Path) -> None:
        self.skip_unless_listed()
        async with self.opened(tmp_path) as (tier, info):
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            step = max(1, fits // 8)
            for start in range(0, 4 * fits, step):
                if start >= fits - step:
                    first = start - (fits - step)
                    await tier.delete([key_of(n) for n in range(first, first + step)])
                keys = [key_of(n) for n in range(start, start + step)]
                assert await put(tier, keys, self.payload_bytes) == [OK] * step
            await assert_holds(tier, keys, self.payload_bytes)

    # -- shared tiers ----------------------------------------------------------------------

    async def test_a_shared_tier_says_what_is_present(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(30)]
        async with self.opened(tmp_path) as (tier, _):
            if not isinstance(tier, SharedTier):
                pytest.skip("only shared tiers are queried for their content")
            await put(tier, keys[::3], self.payload_bytes)
            assert await tier.present(keys) == [n % 3 == 0 for n in range(30)]
            await tier.delete(keys[:4])
            assert await tier.present(keys[:7]) == [False] * 6 + [True]
            await tier.reset(1)
            assert await tier.present(keys) == [False] * 30
            assert await tier.present([]) == []

    # -- recency ---------------------------------------------------------------------------

    async def test_keys_come_least_recently_used_first(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(6)]
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, keys, self.payload_bytes)
            await tier.touch([keys[2], keys[0], key_of(99)])
            await self.assert_listed(tier, 1, 3, 4, 5, 2, 0)

    # -- reset -----------------------------------------------------------------------------

    async def test_reset_forgets_everything(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(10)]
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, keys, self.payload_bytes)
            await tier.reset(1)
            await self.assert_listed(tier)
            await assert_misses(tier, keys, self.payload_bytes)
            new = payload_of(keys[0], self.payload_bytes, version=1)
            assert await tier.write([keys[0]], [new]) == [OK]
            outcome, data = await fetch(tier, keys[0], self.payload_bytes)
            assert outcome is ReadOutcome.OK
            assert np.array_equal(data, new)

    async def test_reset_to_an_epoch_already_reached_forgets_too(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, _):
            for epoch in (5, 5, 1):
                await put(tier, [key_of(1)], self.payload_bytes)
                await tier.reset(epoch)
                await assert_misses(tier, [key_of(1)], self.payload_bytes)

    async def test_reset_gives_the_space_back(self, tmp_path: Path) -> None:
        self.skip_unless_listed()
        async with self.opened(tmp_path) as (tier, info):
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            keys = [key_of(n) for n in range(fits)]
            for epoch in (1, 2):
                assert await put(tier, keys, self.payload_bytes) == [OK] * fits
                await tier.reset(epoch)

    async def test_writes_in_flight_at_a_reset_stay_invisible(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(30)]
        async with self.opened(tmp_path) as (tier, _):
            writing = asyncio.create_task(put(tier, keys, self.payload_bytes))
            await asyncio.sleep(0)
            await tier.reset(1)
            await writing
            await assert_misses(tier, keys, self.payload_bytes)

    # -- many callers, cancelling ----------------------------------------------------------

    async def test_many_callers_at_once(self, tmp_path: Path) -> None:
        async def one(start: int) -> None:
            keys = [key_of(start + n) for n in range(8)]
            assert await put(tier, keys, self.payload_bytes) == [OK] * 8
            await asyncio.gather(assert_holds(tier, keys, self.payload_bytes), tier.touch(keys[:4]))
            await tier.delete(keys[4:])
            await assert_misses(tier, keys[4:], self.payload_bytes)
            await assert_holds(tier, keys[:4], self.payload_bytes)

        async with self.opened(tmp_path) as (tier, _):
            await asyncio.gather(*(one(100 * n) for n in range(16)))
            found = await self.listed(tier)
            assert found is None or len(found) == 16 * 4

    async def test_two_writers_of_one_key(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(4)]
        async with self.opened(tmp_path) as (tier, _):
            both = await asyncio.gather(
                put(tier, keys, self.payload_bytes), put(tier, keys[::-1], self.payload_bytes)
            )
            assert list(both) == [[OK] * 4, [OK] * 4]
            await assert_holds(tier, keys, self.payload_bytes)
            found = await self.listed(tier)
            assert found is None or len(found) == 4

    async def test_a_cancelled_read_leaves_its_buffers_alone(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(20)]
        into = [aligned(self.payload_bytes) for _ in keys]
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, keys, self.payload_bytes)
            reading = asyncio.create_task(tier.read(keys, into))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for data in into:
                data[:] = 0xDB
            await assert_holds(tier, keys, self.payload_bytes)
        assert all((data == 0xDB).all() for data in into)

    async def test_a_cancelled_write_is_whole_or_absent(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(20)]
        data = [payload_of(key, self.payload_bytes) for key in keys]
        async with self.opened(tmp_path) as (tier, _):
            writing = asyncio.create_task(tier.write(keys, data))
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            for buffer in data:
                buffer[:] = 0xDB
            for key in keys:
                outcome, got = await fetch(tier, key, self.payload_bytes)
                assert outcome in (ReadOutcome.OK, ReadOutcome.MISS)
                if outcome is ReadOutcome.OK:
                    assert np.array_equal(got, payload_of(key, self.payload_bytes))
            assert await put(tier, keys, self.payload_bytes) == [OK] * len(keys)

    # -- open and close --------------------------------------------------------------------

    async def test_a_closed_tier_says_so(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path / "tier", self.capacity_bytes)
        await self._assert_closed(tier)
        await tier.open()
        await tier.aclose()
        await tier.aclose()
        await self._assert_closed(tier)
        assert isinstance(tier.stats(), dict)

    async def _assert_closed(self, tier: Tier) -> None:
        data = aligned(self.payload_bytes)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: tier.write([key_of(1)], [data]),
            lambda: tier.read([key_of(1)], [data]),
            lambda: tier.delete([key_of(1)]),
            lambda: tier.touch([key_of(1)]),
            lambda: tier.reset(1),
            lambda: all_keys(tier),
        ]
        for call in calls:
            with pytest.raises(TierClosedError):
                await call()

    async def test_stats_are_plain_numbers(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, [key_of(1)], self.payload_bytes)
            await assert_holds(tier, [key_of(1)], self.payload_bytes)
            assert all(isinstance(value, int | float) for value in tier.stats().values())

    # -- after a restart (persistent tiers) ------------------------------------------------

    async def test_a_restart_keeps_records_and_recency(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(12)]
        async with self.opened(tmp_path) as (tier, info):
            if not (info.persistent and self.is_listed):
                pytest.skip("not persistent, or not listed")
            await put(tier, keys, self.payload_bytes)
            await tier.touch([keys[3]])
            await tier.delete([keys[0]])
            used = 11 * tier.footprint_bytes(self.payload_bytes)
        async with self.opened(tmp_path) as (tier, info):
            assert (info.record_count, info.used_bytes) == (11, used)
            found = await all_keys(tier)
            assert [stored.key for stored in found] == [*keys[1:3], *keys[4:], keys[3]]
            assert {stored.payload_bytes for stored in found} == {self.payload_bytes}
            await assert_holds(tier, keys[1:], self.payload_bytes)
            await assert_misses(tier, keys[:1], self.payload_bytes)

    async def test_a_reset_survives_a_restart(self, tmp_path: Path) -> None:
        keys = [key_of(n) for n in range(4)]
        async with self.opened(tmp_path) as (tier, info):
            if not (info.persistent and self.is_listed):
                pytest.skip("not persistent, or not listed")
            await put(tier, keys, self.payload_bytes)
            await tier.reset(3)
            await put(tier, keys[:1], self.payload_bytes)
        async with self.opened(tmp_path) as (tier, info):
            assert info.record_count == 1
            await assert_holds(tier, keys[:1], self.payload_bytes)
            await assert_misses(tier, keys[1:], self.payload_bytes)

    async def test_a_full_tier_survives_a_restart(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, info):
            if not (info.persistent and self.is_listed):
                pytest.skip("not persistent, or not listed")
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            keys = [key_of(n) for n in range(fits)]
            assert await put(tier, keys, self.payload_bytes) == [OK] * fits
        async with self.opened(tmp_path) as (tier, info):
            assert info.record_count == fits
            extra = key_of(10**6)
            assert await put(tier, [extra], self.payload_bytes) == [FULL]
            await tier.delete(keys[:1])
            assert await put(tier, [extra], self.payload_bytes) == [OK]
            await assert_holds(tier, [extra, *keys[1::19]], self.payload_bytes)

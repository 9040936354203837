"""A tier kept below its watermarks by a policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from policies.base import EntryInfo, RemoveCause
from policies.eviction.lru import LruPolicy
from tiers.adapters.evicting import EvictingTier
from tiers.base import Key, Tier, WriteOutcome
from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, assert_holds, assert_misses, key_of, put
from tiers.testing.faults import CountingTier
from tiers.testing.memory_tier import MemoryTier

CAUSES = (RemoveCause.EVICTED, RemoveCause.DROPPED)


def describe(key: Key, payload_bytes: int) -> EntryInfo:
    return EntryInfo(size_bytes=payload_bytes)


def evicting(inner: Tier, **options: Any) -> EvictingTier:
    return EvictingTier(inner, LruPolicy(), describe=describe, causes=CAUSES, **options)


async def test_ten_thousand_chunks_never_exceed_a_capacity_of_a_thousand(tmp_path: Path) -> None:
    """The folder stays within the cap."""
    size, cap = 32 << 10, 1000
    capacity_bytes = (cap * size) + (3 << 20)
    tier = evicting(LmdbTier(tmp_path / "tier", capacity_bytes, reserve_bytes=0))
    await tier.open()
    for start in range(0, 10_000, 50):
        keys = [key_of(n) for n in range(start, start + 50)]
        assert await put(tier, keys, size) == [WriteOutcome.OK] * 50
        on_disk = sum(path.stat().st_size for path in (tmp_path / "tier").iterdir())  # a test
        assert on_disk <= capacity_bytes + (64 << 10), start
        await assert_holds(tier, keys[:2], size)
    await assert_holds(tier, [key_of(n) for n in range(9_200, 10_000)], size)
    await assert_misses(tier, [key_of(n) for n in range(8_000)], size)
    await tier.aclose()


async def test_the_order_of_use_decides_evictions_and_survives_a_restart(tmp_path: Path) -> None:
    size = 1 << 20
    kept = [key_of(n) for n in range(4)]
    tier = evicting(LmdbTier(tmp_path / "tier", 24 << 20, reserve_bytes=0), high=0.9, low=0.8)
    await tier.open()
    await put(tier, [key_of(n) for n in range(16)], size)
    await assert_holds(tier, kept, size)
    await tier.aclose()

    tier = evicting(LmdbTier(tmp_path / "tier", 24 << 20, reserve_bytes=0), high=0.9, low=0.8)
    assert (await tier.open()).record_count == 16
    await put(tier, [key_of(n) for n in range(100, 110)], size)
    await assert_holds(tier, kept, size)
    await assert_misses(tier, [key_of(4), key_of(5)], size)
    await tier.aclose()


async def test_evicting_ahead_leaves_space_for_the_next_write() -> None:
    inner = CountingTier(MemoryTier(100_000))
    tier = evicting(inner, high=0.8, low=0.5)
    await tier.open()
    await put(tier, [key_of(n) for n in range(80)], 1000)
    assert not inner.calls["delete"]
    await put(tier, [key_of(80)], 1000)
    await asyncio.sleep(0)  # the background task runs; the memory tier itself never waits
    assert inner.calls["delete"] > 0
    left = [stored.key for stored in await all_keys(tier)]
    assert left == [key_of(n) for n in range(31, 81)]
    await tier.aclose()


async def test_a_write_larger_than_the_tier_is_full() -> None:
    tier = evicting(MemoryTier(10_000))
    await tier.open()
    assert await put(tier, [key_of(1)], 20_000) == [WriteOutcome.FULL]
    await tier.aclose()


def test_watermarks_are_checked() -> None:
    with pytest.raises(ValueError, match="watermarks"):
        evicting(MemoryTier(1), high=0.5, low=0.6)

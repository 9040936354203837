"""The fault wrappers pass calls on, inject what they promise, and count it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tiers.base import ReadOutcome, Tier, TierIoError, WriteOutcome
from tiers.testing import TierContract, aligned, all_keys, assert_holds, key_of, payload_of, put
from tiers.testing.faults import (
    CountingTier,
    Damage,
    DamagingTier,
    FailingTier,
    FullTier,
    HoldingTier,
    SlowTier,
    from_nth,
    nth,
)
from tiers.testing.memory_tier import MemoryTier

KEYS = [key_of(n) for n in range(4)]
SIZE = 1000


class TestCountingTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return CountingTier(MemoryTier(capacity_bytes))


async def filled() -> MemoryTier:
    tier = MemoryTier(1 << 20)
    await tier.open()
    await put(tier, KEYS, SIZE)
    return tier


async def test_calls_are_counted() -> None:
    tier = CountingTier(await filled())
    await assert_holds(tier, KEYS, SIZE)
    await tier.delete(KEYS[:1])
    assert len(await all_keys(tier)) == 3
    assert tier.calls == {"read": 1, "delete": 1, "keys": 1}
    assert tier.keys_seen["read"] == 4
    await tier.aclose()


async def test_only_the_nth_call_fails() -> None:
    tier = FailingTier(await filled(), nth(3), methods={"read"})
    for call in range(1, 6):
        await tier.touch(KEYS)  # not counted
        if call == 3:
            with pytest.raises(TierIoError, match="injected"):
                await assert_holds(tier, KEYS, SIZE)
        else:
            await assert_holds(tier, KEYS, SIZE)
    assert tier.met == 1
    await tier.aclose()


async def test_calls_are_held_until_released() -> None:
    tier = HoldingTier(await filled(), methods={"read"})
    reading = asyncio.create_task(assert_holds(tier, KEYS, SIZE))
    await tier.waiting()
    await tier.touch(KEYS)  # others pass
    assert not reading.done()
    tier.release()
    await reading
    await assert_holds(tier, KEYS, SIZE)
    assert tier.met == 1
    await tier.aclose()


async def test_a_slow_tier_is_slow_and_right() -> None:
    tier = SlowTier(await filled(), 0.001, 0.001)
    await assert_holds(tier, KEYS, SIZE)
    await put(tier, KEYS, SIZE)
    assert tier.met == 2
    await tier.aclose()


async def test_full_from_the_second_write_on() -> None:
    tier = FullTier(await filled(), from_nth(2))
    new = [key_of(n) for n in range(10, 14)]
    assert await put(tier, new[:2], SIZE) == [WriteOutcome.OK] * 2
    assert await put(tier, new[2:], SIZE) == [WriteOutcome.FULL] * 2
    await assert_holds(tier, KEYS + new[:2], SIZE)
    assert tier.met == 2
    await tier.aclose()


@pytest.mark.parametrize("damage", Damage)
@pytest.mark.parametrize("detected", [True, False])
async def test_damage_reaches_every_record(damage: Damage, detected: bool) -> None:
    tier = DamagingTier(await filled(), damage, detected=detected)
    into = [aligned(SIZE) for _ in KEYS]
    outcomes = await tier.read(KEYS, into)
    assert outcomes == [ReadOutcome.CORRUPT if detected else ReadOutcome.OK] * 4
    assert tier.met == 4
    for key, data in zip(KEYS, into, strict=True):
        assert not np.array_equal(data, payload_of(key, SIZE))
    await tier.aclose()

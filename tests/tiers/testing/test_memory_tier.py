"""The memory tiers fulfil the contract, and detect damage to their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.adapters.wrapper import SharedTierWrapper
from tiers.base import ReadOutcome, Tier
from tiers.testing import TierContract, fetch, key_of, put
from tiers.testing.memory_tier import MemoryTier, SharedMemory, SharedMemoryTier


class TestMemoryTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return MemoryTier(capacity_bytes)


class TestSharedMemoryTier(TierContract):
    is_listed = False

    @pytest.fixture(autouse=True)
    def memory(self) -> None:
        self.shared = SharedMemory(self.capacity_bytes)

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SharedMemoryTier(self.shared)


class TestSharedTierWrapper(TestSharedMemoryTier):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SharedTierWrapper(SharedMemoryTier(self.shared))


async def test_a_flipped_bit_is_corrupt() -> None:
    tier = MemoryTier(1 << 20)
    await tier.open()
    await put(tier, [key_of(1)], 5000)
    tier.records[key_of(1)][1][4321] ^= 1
    outcome, _ = await fetch(tier, key_of(1), 5000)
    assert outcome is ReadOutcome.CORRUPT
    await tier.aclose()


async def test_swapped_records_are_corrupt() -> None:
    tier = MemoryTier(1 << 20)
    await tier.open()
    one, two = key_of(1), key_of(2)
    await put(tier, [one, two], 5000)
    records = tier.records
    records[one], records[two] = records[two], records[one]
    for key in (one, two):
        outcome, _ = await fetch(tier, key, 5000)
        assert outcome is ReadOutcome.CORRUPT
    await tier.aclose()

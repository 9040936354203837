"""The contract of tiers that processes share: they evict by themselves, and a reset separates
them."""

from __future__ import annotations

from pathlib import Path

from tiers.base import SharedTier, WriteOutcome
from tiers.testing import TierContract, all_keys, assert_holds, assert_misses, key_of, put

OK = WriteOutcome.OK


class SharedTierContract(TierContract):
    """Inherit from this class as from ``TierContract``. ``usable`` is the share of its capacity
    that a tier is guaranteed to hold."""

    usable = 1.0
    kept = 0.8

    async def test_capacity_is_hard_and_full_is_an_outcome(self, tmp_path: Path) -> None:
        """A shared tier evicts the oldest records; only a record larger than all of it is
        ``FULL``."""
        async with self.opened(tmp_path, self.capacity_bytes) as (tier, info):
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            keys = [key_of(n) for n in range(fits + 5)]
            for start in range(0, len(keys), 64):
                batch = keys[start : start + 64]
                assert await put(tier, batch, self.payload_bytes) == [OK] * len(batch)
            held = [stored.key for stored in await all_keys(tier)]
            assert held == keys[-len(held) :], "only the oldest record may be evicted"
            assert len(held) > fits * self.kept
            await assert_holds(tier, held[::17], self.payload_bytes)
            await assert_misses(tier, keys[:5], self.payload_bytes)
            assert await put(tier, [key_of(10**6)], info.capacity_bytes + 1) == [WriteOutcome.FULL]
            assert len(await all_keys(tier)) == len(held), (
                "a record that is too large must evict nothing"
            )

    async def test_a_full_tier_survives_a_restart(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as (tier, info):
            fits = info.capacity_bytes // tier.footprint_bytes(self.payload_bytes)
            fits = int(fits * self.usable)
            keys = [key_of(n) for n in range(fits)]
            assert await put(tier, keys, self.payload_bytes) == [OK] * fits
        async with self.opened(tmp_path) as (tier, info):
            assert info.record_count == fits
            held = keys
            for n in range(10**6, 10**6 + fits // 8):
                assert await put(tier, [key_of(n)], self.payload_bytes) == [OK]
                held = [*held, key_of(n)]
            await assert_holds(tier, held[fits // 2 :: 19], self.payload_bytes)
            await assert_misses(tier, keys[:1], self.payload_bytes)

    async def test_a_reset_survives_a_restart(self, tmp_path: Path) -> None:
        """Records stored since the reset belong to weights that the next start does not have."""
        keys = [key_of(n) for n in range(4)]
        async with self.opened(tmp_path) as (tier, _):
            await put(tier, keys, self.payload_bytes)
            await tier.reset(3)
            await put(tier, keys[:1], self.payload_bytes)
            await assert_holds(tier, keys[:1], self.payload_bytes)
        async with self.opened(tmp_path) as (tier, _):
            await assert_misses(tier, keys, self.payload_bytes)
            assert await all_keys(tier) == []

    async def test_the_tier_implements_the_shared_interface(self, tmp_path: Path) -> None:
        assert isinstance(self.make_tier(tmp_path / "tier", self.capacity_bytes), SharedTier)

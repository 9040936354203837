"""The LMDB tier keeps the contract, and the promises of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tiers import commit_thread
from tiers.base import Tier, WriteOutcome
from tiers.lmdb_tier import LmdbTier
from tiers.testing import TierContract, assert_holds, key_of, put


class TestLmdbTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return LmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)


async def test_a_deletion_shares_the_commit_of_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not keep those waiting who need its place."""
    monkeypatch.setattr(commit_thread, "LAZY_S", 60.0)
    tier = LmdbTier(tmp_path / "tier", (2 << 20) + (1 << 20), reserve_bytes=0)
    await tier.open()
    small, large = 100 << 10, 900 << 10
    await put(tier, [key_of(0)], small)
    before = tier.stats()["commits"]
    await tier.delete([key_of(0)])
    assert await put(tier, [key_of(1)], small) == [WriteOutcome.OK]
    assert tier.stats()["commits"] == before + 1
    await tier.delete([key_of(1)])
    async with asyncio.timeout(30):
        assert await put(tier, [key_of(2)], large + small) == [WriteOutcome.OK]
    await assert_holds(tier, [key_of(2)], large + small)
    tier.check()
    await tier.aclose()

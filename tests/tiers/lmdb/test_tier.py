"""The LMDB tier fulfils the contract and gives additional guarantees."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tiers.base import ReadOutcome, Tier, WriteOutcome
from tiers.lmdb import commit_thread
from tiers.lmdb.tier import LmdbTier
from tiers.testing import TierContract, aligned, all_keys, assert_holds, fetch, key_of, put


class TestLmdbTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return LmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)


async def test_a_deletion_shares_the_commit_of_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion does not delay writes that need its space."""
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
    async with asyncio.timeout(PATIENCE_S):
        assert await put(tier, [key_of(2)], large + small) == [WriteOutcome.OK]
    await assert_holds(tier, [key_of(2)], large + small)
    tier.check()
    await tier.aclose()


async def test_deletions_from_an_index_without_space(tmp_path: Path) -> None:
    """The keys take twice the space reserved for them: a full index accepts no more records, but it
    can delete some, however many pages that touches."""
    rng = random.Random(20261122)
    tier = LmdbTier(tmp_path / "tier", 24 << 20, record_bytes=4096, reserve_bytes=0)
    await tier.open()
    page = aligned(4096)
    outcomes = []
    while WriteOutcome.FULL not in outcomes:
        outcomes = await tier.write([rng.randbytes(480) for _ in range(200)], [page] * 200)
    used_bytes = tier.used_bytes
    await tier.delete([stored.key for stored in await all_keys(tier)][::3])
    async with asyncio.timeout(PATIENCE_S):
        while tier.used_bytes == used_bytes:
            await asyncio.sleep(0.01)
            await tier.touch([])  # this raises if the index cannot be written any more
    await tier.reset(1)
    assert await tier.write([rng.randbytes(480)], [page]) == [WriteOutcome.OK]
    tier.check()
    await tier.aclose()


async def test_a_damaged_record_is_forgotten_even_if_it_was_touched_meanwhile(
    tmp_path: Path,
) -> None:
    tier = LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0)
    await tier.open()
    await put(tier, [key_of(0)], 9000)
    with (tmp_path / "tier" / "payload.data").open("r+b") as file:  # a test
        file.seek(4096 + 5000)
        file.write(b"garbage")
    reading = asyncio.ensure_future(fetch(tier, key_of(0), 9000))
    await asyncio.sleep(0)
    await tier.touch([key_of(0)])
    assert (await reading)[0] is ReadOutcome.CORRUPT
    assert await all_keys(tier) == []
    await tier.aclose()

"""The LMDB tier that processes share fulfils the contract of shared tiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiers.shared.contract import SharedTierContract
from tiers.base import Tier, TierIoError
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.options import Recovery
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import key_of, put


class TestSharedLmdbTier(SharedTierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SharedLmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)


async def test_strict_refuses_lost_records_and_changes_nothing(tmp_path: Path) -> None:
    def make(recovery: Recovery) -> SharedLmdbTier:
        return SharedLmdbTier(tmp_path / "tier", 4 << 20, reserve_bytes=0, recovery=recovery)

    tier = make(Recovery.QUIET)
    await tier.open()
    await put(tier, [key_of(n) for n in range(6)], 4096)
    await tier.aclose()
    os.truncate(tmp_path / "tier" / PAYLOAD_NAME, 4096 * 4)
    for _ in range(2):
        with pytest.raises(TierIoError, match="3 records are incomplete"):
            await make(Recovery.STRICT).open()
    tier = make(Recovery.QUIET)
    assert (await tier.open()).record_count == 3
    assert tier.stats()["dropped_at_open"] == 3
    await tier.aclose()

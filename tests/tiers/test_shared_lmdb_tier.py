"""The LMDB tier that processes share keeps the contract of such tiers."""

from __future__ import annotations

from pathlib import Path

from tests.tiers.shared_contract import SharedTierContract
from tiers.base import Tier
from tiers.shared_lmdb_tier import SharedLmdbTier


class TestSharedLmdbTier(SharedTierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return SharedLmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)

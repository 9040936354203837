"""The LMDB tier keeps the contract, and the promises of its own."""

from __future__ import annotations

from pathlib import Path

from tiers.base import Tier
from tiers.lmdb_tier import LmdbTier
from tiers.testing import TierContract


class TestLmdbTier(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return LmdbTier(folder, capacity_bytes, record_bytes=4096, reserve_bytes=0)

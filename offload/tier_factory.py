"""Makes the lower tiers that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.config import OffloadConfig, TierConfig
from tiers.base import Tier


@dataclass(frozen=True)
class TierSpec:
    """One lower tier of one rank: where it was configured, its name in logs and metrics, its
    folder, its share of the capacity in bytes, what its records must carry, and the claim on the
    folder that lasts as long as this object."""

    where: str
    name: str
    config: TierConfig
    folder: Path
    capacity_bytes: int
    namespace: bytes
    rank: int
    epoch: int
    claim: object = None


def tier_names(config: OffloadConfig) -> list[str]:
    """A name per lower tier: its type, numbered from the second of a type on."""
    names: list[str] = []
    for tier in config.tiers:
        count = sum(1 for name in names if name.rstrip("0123456789") == tier.type)
        names.append(tier.type if not count else f"{tier.type}{count + 1}")
    return names


def make_tier(spec: TierSpec) -> Tier:
    """The tier, not opened yet."""
    from tiers.lmdb_tier import LmdbTier

    return LmdbTier(
        spec.folder,
        spec.capacity_bytes,
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        io_threads=spec.config.io_threads,
    )

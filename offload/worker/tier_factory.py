"""Creates the lower tiers that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.config.schema import OffloadConfig, TierConfig
from offload.worker.idle_scrub import ScrubLimits
from offload.worker.tier_claim import TierClaim
from tiers.adapters.reopening import ReopeningTier, SharedReopeningTier
from tiers.base import Tier
from tiers.files.shared_tier import SharedFileTier
from tiers.files.tier import FileTier
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.lmdb.tier import LmdbTier
from tiers.mooncake.bulletin import Notice
from tiers.mooncake.client import MooncakeSettings
from tiers.mooncake.tier import MooncakeTier


@dataclass(frozen=True)
class TierSpec:
    """One lower tier of one rank.

    It contains the tier's path in the configuration, its name in logs and metrics, its folder, its
    share of the capacity in bytes, and the identity that its records must have. ``folder`` means
    nothing for a tier in a store.

    ``claim`` holds the folder; a tier without it stays closed after its medium has failed. ``make``
    creates a tier that no configured type describes. ``notice`` is the description of its records
    that a tier in a store publishes for other engines. ``set_aside`` is the number of untrusted
    folders that were moved aside when this one was claimed.
    """

    where: str
    name: str
    config: TierConfig
    folder: Path
    capacity_bytes: int
    namespace: bytes
    rank: int
    epoch: int
    claim: TierClaim | None = None
    make: Callable[[], Tier] | None = None
    notice: Notice | None = None
    set_aside: int = 0

    @property
    def description(self) -> str:
        """Names the tier in messages: its path in the configuration, and its folder or the address
        of its store."""
        return f"{self.where} ({self.config.options.get('master') or self.folder})"

    @property
    def noted_epoch(self) -> int:
        """The epoch that is noted beside the folder. It can be beyond that of the records in it."""
        return self.claim.noted_epoch if self.claim is not None else 0

    def renewed(self, epoch: int) -> TierSpec:
        """Claim the folder again for a tier that has reached this ``epoch``. The capacity stays the
        same, because the scheduler relies on it. Raises the errors of ``TierClaim.renew``."""
        assert self.claim is not None
        self.claim.renew(epoch)
        return replace(self, folder=self.claim.folder, epoch=epoch)


def scrub_limits(config: OffloadConfig, shares: int) -> dict[int, ScrubLimits]:
    """Scrub limits of the tiers that verify their records while they are idle, by tier number.

    The rate is the share of one of ``shares`` workers.
    """
    return {
        number: ScrubLimits(tier.options["scrub_rate"] / shares, tier.options["scrub_period_s"])
        for number, tier in enumerate(config.tiers)
        if tier.options.get("scrub") == "idle" and not tier.shared
    }


def make_tier(spec: TierSpec, record_bytes: int, memory: range | None = None) -> Tier:
    """Create the tier; it is not opened yet.

    ``record_bytes`` is the smallest payload that it will get; ``memory`` contains the addresses
    that payloads are read into and written from.
    """
    if spec.make is not None:
        return spec.make()
    make = _MAKERS[spec.config.type]

    def make_again(epoch: int) -> Tier:
        return make(spec.renewed(epoch), record_bytes, memory)

    tier = make(spec, record_bytes, memory)
    if spec.claim is None:
        return tier
    is_strict = spec.config.recovery == Recovery.STRICT.value
    reopening: Callable[..., Tier] = SharedReopeningTier if spec.config.shared else ReopeningTier
    return reopening(tier, make_again, spec.claim.keep_epoch, spec.epoch, is_strict=is_strict)


def _lmdb(spec: TierSpec, record_bytes: int, _memory: range | None) -> Tier:
    config = spec.config
    options = LmdbOptions(
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        io_threads=config.io_threads,
        recovery=Recovery(config.recovery),
        reserve_bytes=config.reserve,
        record_bytes=record_bytes,
        direct_io=config.options.get("direct_io") != "off",
        key_file=config.encryption.key_file if config.encryption else "",
        compress=config.compression == "zstd",
    )
    where = (spec.folder, spec.capacity_bytes)
    if config.shared:
        return SharedLmdbTier(
            *where,
            options=options,
            low_watermark=config.low_watermark,
            noted_epoch=spec.noted_epoch,
        )
    return LmdbTier(*where, options=options)


def _file(spec: TierSpec, _record_bytes: int, _memory: range | None) -> Tier:
    make: Callable[..., Tier] = FileTier
    if spec.config.shared:
        make = partial(SharedFileTier, noted_epoch=spec.noted_epoch)
    return make(
        spec.folder,
        spec.capacity_bytes,
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        depth=spec.config.io_threads,
    )


def mooncake_settings(config: TierConfig, segment_bytes: int) -> MooncakeSettings:
    """The settings for joining a tier's store with this much memory."""
    options = config.options
    host = options["master"].rpartition(":")[0]
    return MooncakeSettings(
        options["master"],
        options["metadata"] or f"http://{host}:8080/metadata",
        segment_bytes,
        options["protocol"],
        options["device"],
        options["host"],
    )


def _mooncake(spec: TierSpec, _record_bytes: int, memory: range | None) -> Tier:
    """Create a Mooncake tier. The tier reconnects to its master by itself, so it needs no
    reopening."""
    return MooncakeTier(
        mooncake_settings(spec.config, spec.capacity_bytes),
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        memory=memory,
        threads=spec.config.io_threads,
        notice=spec.notice,
    )


_MAKERS: dict[str, Callable[[TierSpec, int, range | None], Tier]] = {
    "lmdb": _lmdb,
    "file": _file,
    "mooncake": _mooncake,
}
"""Creates a tier of each type (``offload.config.tier_types``). The arguments are those of
``make_tier``."""

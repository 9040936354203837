"""Makes the lower tiers that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.config import OffloadConfig, TierConfig, at_least, check_cpu_capacity
from offload.errors import Problem
from offload.idle_scrub import ScrubLimits
from offload.sizes import KIB, format_size
from tiers import lmdb_store, shared_store
from tiers.base import ALIGNMENT, Tier
from tiers.direct_io import pages_for
from tiers.file_tier import FileTier
from tiers.lmdb_folder import least_capacity
from tiers.lmdb_index import RECORD_INDEX_BYTES
from tiers.lmdb_store import LmdbOptions, Recovery
from tiers.lmdb_tier import LmdbTier
from tiers.mooncake_board import Notice
from tiers.mooncake_client import MooncakeSettings
from tiers.mooncake_tier import MooncakeTier
from tiers.reopening import ReopeningTier
from tiers.shared_file_tier import SharedFileTier
from tiers.shared_index import SHARED_RECORD_INDEX_BYTES
from tiers.shared_lmdb_tier import SharedLmdbTier

SMALL_FILES_BYTES = 64 * KIB
"""What locks, claim, epoch and manifest of a rank may take of its share of a tier's capacity."""


@dataclass(frozen=True)
class TierSpec:
    """One lower tier of one rank: where it was configured, its name in logs and metrics, its
    folder, its share of the capacity in bytes, and what its records must carry.

    ``renew(epoch)`` claims the folder once more after its medium had failed, for a tier that has
    reached this epoch, and raises while it is not back; without it a failed tier stays shut.
    ``make`` makes a tier that is none of the configured types.
    ``notice`` is what a tier on a store tells others of its records.
    ``keep_epoch(epoch)`` notes in the folder that the tier is about to reach this epoch.
    ``set_aside`` is how many folders were moved aside, because they could not be trusted, when
    this one was claimed."""

    where: str
    name: str
    config: TierConfig
    folder: Path
    capacity_bytes: int
    namespace: bytes
    rank: int
    epoch: int
    renew: Callable[[int], TierSpec] | None = None
    keep_epoch: Callable[[int], object] = lambda _epoch: None
    make: Callable[[], Tier] | None = None
    notice: Notice | None = None
    set_aside: int = 0


def tier_names(config: OffloadConfig) -> list[str]:
    """A name per lower tier: its type, numbered from the second of a type on; what is read of
    others below the same path is called after the tier."""
    names: list[str] = []
    for tier in config.tiers:
        count = sum(1 for name in names if name.rstrip("0123456789") == tier.type)
        names.append(tier.type if not count else f"{tier.type}{count + 1}")
    own = names[: len(config.tiers)]
    pairs = zip(config.tiers, own, strict=True)
    return own + [f"{name}_translated" for tier, name in pairs if tier.geometry == "translate"]


def check_capacity(
    config: OffloadConfig, slot_bytes: int, ranks: int, record_bytes: int = 0
) -> list[Problem]:
    """Capacities that cannot hold one chunk, once the bytes of chunks on each rank are known:
    ``slot_bytes`` of the largest, ``record_bytes`` of the smallest (0: as the largest)."""
    problems = check_cpu_capacity(config, slot_bytes, ranks)
    chunk = f"one chunk takes {format_size(slot_bytes)} on each of {ranks} ranks"
    for number, tier in enumerate(config.tiers):
        needed = ranks * least_share(tier, slot_bytes, record_bytes or slot_bytes)
        if tier.path and tier.capacity < needed:
            beside = ", and the index lies beside it" if tier.type == "lmdb" else ""
            what = f"{format_size(tier.capacity)} holds no chunk: {chunk}{beside}"
            fix = f"Give at least {at_least(needed)}."
            problems.append(Problem(f"$.tiers[{number}].capacity", what, fix))
    return problems


def least_share(tier: TierConfig, payload_bytes: int, record_bytes: int) -> int:
    """The smallest share of a tier's capacity with which one rank can store a payload of this size,
    where the smallest payloads have ``record_bytes``."""
    if tier.type != "lmdb":
        return (1 + pages_for(payload_bytes)) * ALIGNMENT + SMALL_FILES_BYTES
    per_record, small = RECORD_INDEX_BYTES, lmdb_store.SMALL_FILES_BYTES
    if tier.shared:
        per_record, small = SHARED_RECORD_INDEX_BYTES, shared_store.SMALL_FILES_BYTES
    least = least_capacity(payload_bytes, max(record_bytes, ALIGNMENT), per_record, small)
    return least + SMALL_FILES_BYTES


def scrub_limits(config: OffloadConfig, shares: int) -> dict[int, ScrubLimits]:
    """The tiers that verify their records while they are idle, by number, with the part of the rate
    that one of ``shares`` workers has."""
    return {
        number: ScrubLimits(tier.options["scrub_rate"] / shares, tier.options["scrub_period_s"])
        for number, tier in enumerate(config.tiers)
        if tier.options.get("scrub") == "idle" and not tier.shared
    }


def make_tier(spec: TierSpec, record_bytes: int, memory: range | None = None) -> Tier:
    """The tier, not opened yet. ``record_bytes`` is the smallest payload it will be given;
    ``memory`` are the addresses that payloads are read into and written from."""

    def make_again(epoch: int) -> Tier:
        nonlocal spec
        assert spec.renew is not None
        spec = spec.renew(epoch)
        return _MAKERS[spec.config.type](spec, record_bytes)

    if spec.make is not None:
        return spec.make()
    if spec.config.type == "mooncake":
        return _mooncake(spec, memory)
    tier = _MAKERS[spec.config.type](spec, record_bytes)
    if spec.renew is None:
        return tier
    is_strict = spec.config.recovery == Recovery.STRICT.value
    return ReopeningTier(tier, make_again, spec.keep_epoch, spec.epoch, is_strict=is_strict)


def _lmdb(spec: TierSpec, record_bytes: int) -> Tier:
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
        return SharedLmdbTier(*where, options=options, low_watermark=config.low_watermark)
    return LmdbTier(*where, options=options)


def _file(spec: TierSpec, record_bytes: int) -> Tier:
    make = SharedFileTier if spec.config.shared else FileTier
    return make(
        spec.folder,
        spec.capacity_bytes,
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        depth=spec.config.io_threads,
    )


def mooncake_settings(config: TierConfig, segment_bytes: int) -> MooncakeSettings:
    """How to join the store of a tier, giving it that much memory."""
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


def _mooncake(spec: TierSpec, memory: range | None) -> Tier:
    """It finds its master again by itself, so nobody has to open it again."""
    return MooncakeTier(
        mooncake_settings(spec.config, spec.capacity_bytes),
        namespace=spec.namespace,
        rank=spec.rank,
        epoch=spec.epoch,
        memory=memory,
        threads=spec.config.io_threads,
        notice=spec.notice,
    )


_MAKERS: dict[str, Callable[[TierSpec, int], Tier]] = {"lmdb": _lmdb, "file": _file}

"""The configuration: the contents of ``kv_connector_extra_config``, defaults, and arithmetic.

``parse_config`` is pure, apart from reading the machine's memory size when no CPU capacity is
given. It returns the same result in every process of one server: scheduler and workers each parse
the configuration and must agree on the number of slots. Checks of the machine (folders, disks,
other servers) are in ``offload.config.machine_checks``; its ``load_config`` parses and checks, and
reports all problems together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from offload.config.fields import EncryptionConfig, PolicyConfig, nearest, read_table, show
from offload.config.memory_limits import MemoryLimit, memory_limit
from offload.config.options import (
    ADMIT_ALL,
    CPU_FIELDS,
    CPU_POLICY,
    ELSEWHERE_CPU,
    ELSEWHERE_TIER,
    ELSEWHERE_TOP,
    LRU,
    TIER_FIELDS,
    TOP_FIELDS,
)
from offload.config.tier_types import TIER_TYPES, TierType
from offload.errors import ConfigError, Problem
from offload.sizes import GIB, KIB, MIB, format_size, rounded_size

CPU_CAPACITY_MIN = 256 * MIB
CPU_CAPACITY_MAX = 64 * GIB
STAGING_MAX = 256 * MIB


class CpuConfig(msgspec.Struct, frozen=True):
    """The CPU tier. ``capacity`` is bytes per server, all ranks together, staging included."""

    capacity: int
    policy: PolicyConfig = CPU_POLICY
    admission: PolicyConfig = ADMIT_ALL
    pin: str = "require"


class TierConfig(msgspec.Struct, frozen=True):
    """One tier below the CPU. ``capacity`` is bytes per server, everything below ``path``.

    ``reserve`` is the disk space in bytes to leave free, or ``None`` for 5 % of the file system but
    at least 2 GiB. ``write_budget_per_day`` is bytes, 0 for no limit. ``options`` contains the
    options of this type of tier.
    """

    type: str
    path: str
    capacity: int
    policy: PolicyConfig = LRU
    admission: PolicyConfig = ADMIT_ALL
    io_threads: int = 8
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    reserve: int | None = None
    write_budget_per_day: int = 0
    recovery: str = "quiet"
    encryption: EncryptionConfig | None = None
    compression: str = "off"
    geometry: str = "own"
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def shared(self) -> bool:
        """True if other engines write to this tier as well."""
        tier_type = TIER_TYPES.get(self.type)
        return bool(tier_type and tier_type.shared) or bool(self.options.get("shared"))


class OffloadConfig(msgspec.Struct, frozen=True):
    """The whole configuration. Sizes are bytes per server, times are seconds."""

    cpu: CpuConfig
    tiers: tuple[TierConfig, ...] = ()
    chunk_blocks: int = 1
    staging: int = 0
    max_inflight_load: int = 0
    max_inflight_store: int = 0
    load_timeout_s: float = 10.0
    fence_timeout_s: float = 5.0
    tier_timeout_s: float = 5.0
    breaker_failures: int = 3
    break_even: bool = True
    look_ahead: float = 0.25
    wait_for_reads: str = "never"
    lookup_timeout_s: float = 0.05
    remember_s: float = 5.0
    max_load_gpu_share: float = 0.5
    kv_layout: str = "vllm"
    require_salt: bool = False
    max_pinned_share: float = 0.25
    record_trace: str | None = None
    record_requests: str | None = None
    recent_requests: int = 256
    verify: str = "off"
    verify_path: str | None = None

    @property
    def translated(self) -> tuple[TierConfig, ...]:
        """The tiers whose paths are also read for other geometries; each counts as a lower tier."""
        return tuple(tier for tier in self.tiers if tier.geometry == "translate")

    @property
    def lower(self) -> tuple[TierConfig, ...]:
        """Every tier below the CPU tier, in the order of their numbers in plans: first the tiers
        that are written, then the read-only ones."""
        return self.tiers + self.translated

    def is_read_only(self, tier: int) -> bool:
        """Return True if ``lower[tier]`` is read-only."""
        return tier >= len(self.tiers)


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Sizes in chunks, the same on every rank.

    ``slots`` belong to the index, ``staging`` slots to the worker.
    """

    slots: int
    staging: int


def parse_config(extra: Mapping[str, Any] | None) -> OffloadConfig:
    """Read the configuration in ``extra``. Raises ``ConfigError`` with every problem."""
    config, problems = draft_config(extra)
    if problems:
        raise ConfigError(problems)
    return config


def draft_config(extra: Any) -> tuple[OffloadConfig, list[Problem]]:
    """Read a configuration as far as possible, with defaults for bad values, and list the problems.

    In the draft, a bad path or capacity of a tier is replaced by ``""`` or 0.
    """
    problems: list[Problem] = []
    raw = {} if extra is None else extra
    if not isinstance(raw, Mapping):
        problems.append(Problem("$", f"must be an object (got {show(raw)})", "Write { ... }."))
        raw = {}
    top = read_table(raw, "$", TOP_FIELDS, problems, ELSEWHERE_TOP)
    cpu = _cpu(top.pop("cpu"), problems)
    tiers = _tiers(top.pop("tiers"), problems)
    _check_duplicates(tiers, problems)
    return _assemble(top, cpu, tiers, problems), problems


def default_config(limit: MemoryLimit | None = None) -> tuple[OffloadConfig, list[str]]:
    """The configuration of a server without one: only a CPU tier, sized by the machine.

    There is no disk tier by default, because the user decides where prompts may be written. The
    second result is a list of log lines that explain the choice.
    """
    limit = limit or memory_limit()
    config = parse_config({"cpu": {"capacity": default_cpu_capacity(limit.limit_bytes)}})
    return config, [describe_default(config.cpu.capacity, limit), NO_DISK_TIER]


NO_DISK_TIER = (
    "no disk tier: blocks are lost when the server stops. To keep them, add for example "
    '"tiers": [{"type": "lmdb", "path": "/var/cache/kv", "capacity": "200GiB"}]'
)


def describe_default(capacity: int, limit: MemoryLimit) -> str:
    """A log line about a CPU capacity that was chosen by default."""
    return (
        f"cpu.capacity not given: using {format_size(capacity)} (a quarter of the memory limit of "
        f"{rounded_size(limit.limit_bytes)} set by {limit.source}, between "
        f"{format_size(CPU_CAPACITY_MIN)} and {format_size(CPU_CAPACITY_MAX)})"
    )


def default_cpu_capacity(memory: int) -> int:
    """A quarter of ``memory`` bytes in steps of 256 MiB, between 256 MiB and 64 GiB.

    The result depends on the memory limit, not on the memory that is free now, so every process of
    a server gets the same number at any time.
    """
    quarter = memory // 4 // CPU_CAPACITY_MIN * CPU_CAPACITY_MIN
    return min(max(quarter, CPU_CAPACITY_MIN), CPU_CAPACITY_MAX)


def slot_counts(config: OffloadConfig, slot_bytes: int, ranks: int) -> SlotCounts:
    """The configured sizes in chunks of ``slot_bytes``, on each of ``ranks`` ranks.

    No other code divides the capacity, because scheduler and workers must agree. Staging is part of
    it, and is at least one slot if there are lower tiers. If the capacity is too small, ``slots``
    is 0: see ``check_cpu_capacity``.
    """
    chunk_bytes = slot_bytes * ranks
    staging = max(1, config.staging // chunk_bytes) if config.tiers else 0
    return SlotCounts(max(0, config.cpu.capacity // chunk_bytes - staging), staging)


def check_cpu_capacity(config: OffloadConfig, slot_bytes: int, ranks: int) -> list[Problem]:
    """Check that the CPU tier can hold one chunk, once a chunk's bytes per rank are known."""
    counts = slot_counts(config, slot_bytes, ranks)
    if counts.slots >= 1:
        return []
    staged = (
        ", and loads from lower tiers need the same amount again for staging"
        if config.tiers
        else ""
    )
    chunk = f"one chunk takes {rounded_size(slot_bytes)} on each of {ranks} ranks"
    what = f"{format_size(config.cpu.capacity)} holds no chunk: {chunk}{staged}"
    fix = f"Give at least {at_least((counts.staging + 1) * slot_bytes * ranks)}."
    return [Problem("$.cpu.capacity", what, fix)]


def _cpu(raw: Any, problems: list[Problem]) -> CpuConfig:
    found = read_table(raw, "$.cpu", CPU_FIELDS, problems, ELSEWHERE_CPU)
    if found["capacity"] is None:
        found["capacity"] = default_cpu_capacity(memory_limit().limit_bytes)
    return CpuConfig(**found)


def _tiers(raw: Any, problems: list[Problem]) -> tuple[TierConfig, ...]:
    if isinstance(raw, Mapping | str) or not isinstance(raw, list | tuple):
        fix = 'Write [{"type": "lmdb", ...}], or [] for a CPU tier only.'
        problems.append(Problem("$.tiers", f"must be a list (got {show(raw)})", fix))
        return ()
    return tuple(_tier(entry, f"$.tiers[{i}]", problems) for i, entry in enumerate(raw))


def _tier(raw: Any, where: str, problems: list[Problem]) -> TierConfig:
    tier_type = _tier_type(raw, where, problems)
    own = tier_type.fields if tier_type else ()
    common = tier_type.common if tier_type else TIER_FIELDS
    fields = (*common, *own)
    if isinstance(raw, Mapping):
        raw = {name: value for name, value in raw.items() if name != "type"}
        if tier_type is None:
            raw = {name: value for name, value in raw.items() if name in _TIER_NAMES}
    found = read_table(raw, where, fields, problems, ELSEWHERE_TIER)
    options = {field.name: found.pop(field.name) for field in own}
    found["path"] = found.get("path") or ""
    found["capacity"] = found.get("capacity") or options.get("segment") or 0
    if found["io_threads"] is None:
        found["io_threads"] = tier_type.io_threads if tier_type else TierConfig.io_threads
    tier = TierConfig(type=tier_type.name if tier_type else "", **found, options=options)
    if tier.shared and isinstance(raw, Mapping):
        for name in sorted(_NOT_SHARED & set(raw) & {field.name for field in fields}):
            what = "does not apply to a shared tier"
            if not name.startswith("scrub"):
                what += ", which does its own eviction"
            problems.append(Problem(f"{where}.{name}", what, "Leave it out."))
    if tier.low_watermark >= tier.high_watermark:
        what = f"must be below high_watermark {tier.high_watermark:g} (got {tier.low_watermark:g})"
        problems.append(Problem(f"{where}.low_watermark", what, "Use for example 0.9 and 0.95."))
    return tier


_TIER_NAMES = {field.name for field in TIER_FIELDS}
_NOT_SHARED = {"policy", "high_watermark", "scrub", "scrub_rate", "scrub_period_s"}
"""Report options that do not apply to a shared tier: it manages its capacity for all its engines,
and does not scrub."""


def _tier_type(raw: Any, where: str, problems: list[Problem]) -> TierType | None:
    if not isinstance(raw, Mapping):
        return None
    if "type" not in raw:
        names = " or ".join(f'"{name}"' for name in TIER_TYPES)
        problems.append(Problem(f"{where}.type", "is required", f"Use {names}."))
        return None
    name = raw["type"]
    found = TIER_TYPES.get(name) if isinstance(name, str) else None
    if found is None:
        fix = nearest(str(name), TIER_TYPES)
        problems.append(Problem(f"{where}.type", f"unknown tier type (got {show(name)})", fix))
    return found


def _check_duplicates(tiers: tuple[TierConfig, ...], problems: list[Problem]) -> None:
    for later, tier in enumerate(tiers):
        for other in tiers[:later]:
            mine, theirs = tier.path + "/", other.path + "/"
            if tier.path and other.path and (mine.startswith(theirs) or theirs.startswith(mine)):
                is_same = mine == theirs
                how = "is also" if is_same else f"is inside or around {show(other.path)},"
                what = f"{show(tier.path)} {how} the folder of another tier"
                fix = "Give every tier its own folder."
                problems.append(Problem(f"$.tiers[{later}].path", what, fix))


def _assemble(
    top: dict[str, Any],
    cpu: CpuConfig,
    tiers: tuple[TierConfig, ...],
    problems: list[Problem],
) -> OffloadConfig:
    capacity = cpu.capacity
    known = all(problem.where != "$.cpu.capacity" for problem in problems)
    sizes = {  # name: (default, bytes_max)
        "staging": (min(capacity // 16, STAGING_MAX), capacity // 2),
        "max_inflight_load": (capacity // 2, capacity),
        "max_inflight_store": (capacity // 4, capacity),
    }
    for name, (default, bytes_max) in sizes.items():
        if top[name] is None:
            top[name] = max(1, default)
        elif top[name] > bytes_max and known:
            share = "half of cpu.capacity" if bytes_max < capacity else "cpu.capacity"
            what = f"{format_size(top[name])} is more than {share} ({format_size(bytes_max)})"
            fix = f"Use at most {format_size(bytes_max)}, or leave it out."
            problems.append(Problem(f"$.{name}", what, fix))
    return OffloadConfig(cpu=cpu, tiers=tiers, **top)


def at_least(size_bytes: int) -> str:
    """A size as text, rounded up to whole MiB (or KiB), so that it is never too small."""
    unit = MIB if size_bytes >= MIB else KIB
    return format_size(-(-size_bytes // unit) * unit)


def tier_names(config: OffloadConfig) -> list[str]:
    """Name each lower tier by its type. The second and later tiers of a type also get a number.

    A read-only tier for other geometries gets the name of the tier with the same path.
    """
    names: list[str] = []
    for tier in config.tiers:
        count = sum(1 for name in names if name.rstrip("0123456789") == tier.type)
        names.append(tier.type if not count else f"{tier.type}{count + 1}")
    own = names[: len(config.tiers)]
    pairs = zip(config.tiers, own, strict=True)
    return own + [f"{name}_translated" for tier, name in pairs if tier.geometry == "translate"]

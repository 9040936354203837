"""Counters of the scheduler side. Plain numbers, read and reset by whoever publishes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offload.ledger import CPU


@dataclass(slots=True)
class TierCounters:
    """What happened in one tier, in chunks (``loaded_tokens``: tokens)."""

    stored_chunks: int = 0
    store_failures: int = 0
    evicted_chunks: int = 0
    dropped_chunks: int = 0
    loaded_tokens: int = 0


@dataclass(slots=True)
class PlannerStats:
    """Counters by tier name (the CPU tier is ``cpu``), and those that belong to no tier."""

    lower_names: Sequence[str]
    tiers: dict[str, TierCounters] = field(default_factory=dict)
    loads: int = 0
    load_failures: int = 0
    load_refusals: int = 0
    short_loads: int = 0
    store_refusals: int = 0
    stores_cancelled: int = 0
    resets: int = 0

    def __post_init__(self) -> None:
        for name in ("cpu", *self.lower_names):
            self.tiers[name] = TierCounters()

    def tier(self, number: int) -> TierCounters:
        """The counters of a tier by its number."""
        return self.tiers["cpu" if number == CPU else self.lower_names[number]]

    def stored(self, tier: int, good: int, bad: int) -> None:
        """Chunks committed to a tier, and chunks that could not be written."""
        self.tier(tier).stored_chunks += good
        self.tier(tier).store_failures += bad

    def evicted(self, tier: int, count: int) -> None:
        """Chunks that left a tier to make room."""
        self.tier(tier).evicted_chunks += count

    def dropped(self, tier: int, count: int) -> None:
        """Chunks forgotten because they were missing or damaged."""
        self.tier(tier).dropped_chunks += count

    def loaded(self, tokens_by_tier: Mapping[int, int], *, failed: bool) -> None:
        """One load that ended."""
        if failed:
            self.load_failures += 1
            return
        self.loads += 1
        for tier, tokens in tokens_by_tier.items():
            self.tier(tier).loaded_tokens += tokens

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its name."""
        flat: dict[str, float] = {
            "loads": self.loads,
            "load_failures": self.load_failures,
            "load_refusals": self.load_refusals,
            "short_loads": self.short_loads,
            "store_refusals": self.store_refusals,
            "stores_cancelled": self.stores_cancelled,
            "resets": self.resets,
        }
        for name, counters in self.tiers.items():
            flat |= {f"{field}:{name}": getattr(counters, field) for field in counters.__slots__}
        return flat


@dataclass(slots=True)
class WorkerStats:
    """Counters of one rank. Bytes and seconds by direction; reads and writes by tier number."""

    store_bytes: int = 0
    store_seconds: float = 0.0
    load_bytes: int = 0
    load_seconds: float = 0.0
    load_timeouts: int = 0
    fence_timeouts: int = 0
    corrupt_records: int = 0
    write_failures: int = 0
    tier_errors: int = 0
    read_bytes: dict[int, int] = field(default_factory=dict)
    read_seconds: dict[int, float] = field(default_factory=dict)
    write_bytes: dict[int, int] = field(default_factory=dict)
    write_seconds: dict[int, float] = field(default_factory=dict)

    def read(self, tier: int, nbytes: int, seconds: float) -> None:
        """One batch read from a lower tier."""
        self.read_bytes[tier] = self.read_bytes.get(tier, 0) + nbytes
        self.read_seconds[tier] = self.read_seconds.get(tier, 0.0) + seconds

    def wrote(self, tier: int, nbytes: int, seconds: float) -> None:
        """One batch written to a lower tier."""
        self.write_bytes[tier] = self.write_bytes.get(tier, 0) + nbytes
        self.write_seconds[tier] = self.write_seconds.get(tier, 0.0) + seconds

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its number."""
        flat: dict[str, float] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, dict):
                flat |= {f"{name}:{tier}": amount for tier, amount in value.items()}
            else:
                flat[name] = value
        return flat

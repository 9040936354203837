"""Counters of the scheduler side. Plain numbers; the publisher reads and resets them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offload.layout.keys import CPU
from offload.telemetry.removed_chunks import Cause, RemovalCauses, Removed

LEFT_FOR = (Cause.EVICTED, Cause.CORRUPT, Cause.LOST, Cause.RESET)
"""Causes of chunks leaving a tier; the other causes explain why chunks did not enter one."""


class ChunkListener(Protocol):
    """Is notified of chunks that can be loaded from a tier (``CPU`` or a lower tier's number), or
    no longer can."""

    def stored(self, tier: int, keys: Sequence[bytes]) -> None:
        """Called when a tier can provide these chunks."""

    def removed(self, tier: int, keys: Sequence[bytes]) -> None:
        """Called when a tier can no longer provide these chunks."""

    def cleared(self) -> None:
        """Called when no tier can provide any chunk."""


@dataclass(slots=True)
class TierCounters:
    """Counts the events of one tier, in chunks or tokens."""

    stored_chunks: int = 0
    store_failures: int = 0
    evicted_chunks: int = 0
    dropped_chunks: int = 0
    loaded_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0


@dataclass(slots=True)
class PlannerStats:
    """Counters by tier name (the CPU tier is ``cpu``), and those that belong to no tier.

    Owned by the planner; used on its thread. ``causes`` remembers why the chunks removed last are
    gone, and since when: ``now`` is the planner's time.
    """

    lower_names: Sequence[str]
    tiers: dict[str, TierCounters] = field(default_factory=dict)
    loads: int = 0
    load_failures: int = 0
    load_refusals: int = 0
    short_loads: int = 0
    store_refusals: int = 0
    stores_cancelled: int = 0
    resets: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    causes: RemovalCauses = field(default_factory=RemovalCauses)
    _listener: ChunkListener | None = None

    def __post_init__(self) -> None:
        for name in ("cpu", *self.lower_names):
            self.tiers[name] = TierCounters()

    def tick(self, now: float) -> None:
        """Set the planner's clock."""
        self.now = now

    def listen(self, listener: ChunkListener) -> None:
        """From now on, notify ``listener`` of every chunk that enters or leaves a tier."""
        self._listener = listener

    def shortened(self) -> None:
        """Count a hit that was shortened because computing its tail is faster than loading it."""
        self.short_loads += 1

    def load_refused(self) -> None:
        """Count a load that the bounds on loads in flight did not allow."""
        self.load_refusals += 1

    def no_space(self, chunks: int, examples: Sequence[bytes]) -> None:
        """Count chunks that found no slot in the CPU tier, and remember the cause for these
        keys."""
        self.store_refusals += chunks
        self.refused(CPU, examples, Cause.NO_SPACE)

    def store_cancelled(self, keys: Sequence[bytes]) -> None:
        """Count a store of these chunks whose GPU blocks were reused before it was sent."""
        self.stores_cancelled += 1
        self.refused(CPU, keys, Cause.CANCELLED)

    def tier(self, number: int) -> TierCounters:
        """The counters of a tier by its number."""
        return self.tiers["cpu" if number == CPU else self.lower_names[number]]

    def stored(self, tier: int, good: Sequence[bytes], bad: Sequence[bytes]) -> None:
        """Count chunks committed to a tier, and chunks that could not be written."""
        self.tier(tier).stored_chunks += len(good)
        self.tier(tier).store_failures += len(bad)
        if bad:
            self._gone(tier, bad, Cause.FAILED)
        if good and self._listener is not None:
            self._listener.stored(tier, good)

    def promoted(self, keys: Sequence[bytes]) -> None:
        """Count chunks that were read into the CPU tier."""
        if keys and self._listener is not None:
            self._listener.stored(CPU, keys)

    def evicted(self, tier: int, keys: Sequence[bytes]) -> None:
        """Count chunks that were evicted from a tier to free space."""
        if keys:
            self.tier(tier).evicted_chunks += len(keys)
            self._left(tier, keys, Cause.EVICTED)

    def dropped(self, tier: int, keys: Sequence[bytes], corrupt: Container[bytes]) -> None:
        """Count chunks that were forgotten because they were damaged (those in ``corrupt``) or
        missing."""
        self.tier(tier).dropped_chunks += len(keys)
        damaged = [key for key in keys if key in corrupt]
        self._left(tier, damaged, Cause.CORRUPT)
        self._left(tier, [key for key in keys if key not in corrupt], Cause.LOST)

    def refused(self, tier: int, keys: Sequence[bytes], cause: Cause) -> None:
        """Count chunks that did not enter a tier."""
        self._gone(tier, keys, cause)

    def planned(self, tokens_by_tier: Mapping[int, int]) -> None:
        """Count a planned load, given its tokens per tier: the tiers above each one lacked those
        tokens."""
        for tier, tokens in tokens_by_tier.items():
            self.tier(tier).hit_tokens += tokens
            for above in range(CPU, tier):
                self.tier(above).missed_tokens += tokens

    def missed(self, tokens: int) -> None:
        """Count wanted tokens that are in no tier, or must not be loaded."""
        for counters in self.tiers.values():
            counters.missed_tokens += tokens

    def reset(self, keys: Sequence[bytes], counts: Mapping[int, int]) -> None:
        """Count a reset: ``counts`` gives the number of forgotten chunks per tier; ``keys`` are
        some of them."""
        self.resets += 1
        for tier, count in counts.items():
            self._count_removed(tier, Cause.RESET, count)
        self.causes.clear()
        self._gone(CPU, keys, Cause.RESET)
        if self._listener is not None:
            self._listener.cleared()

    def _left(self, tier: int, keys: Sequence[bytes], cause: Cause) -> None:
        if keys:
            self._count_removed(tier, cause, len(keys))
            self._gone(tier, keys, cause)
            if self._listener is not None:
                self._listener.removed(tier, keys)

    def _count_removed(self, tier: int, cause: Cause, count: int) -> None:
        name = f"{'cpu' if tier == CPU else self.lower_names[tier]}:{cause.value}"
        self.removed[name] = self.removed.get(name, 0) + count

    def _gone(self, tier: int, keys: Sequence[bytes], cause: Cause) -> None:
        self.causes.note(keys, Removed(cause, tier, self.now))

    def loaded(self, tokens_by_tier: Mapping[int, int], *, failed: bool) -> None:
        """Count one load that ended."""
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
        flat |= {f"removed_chunks:{name}": count for name, count in self.removed.items()}
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
    copy_failures: int = 0
    write_failures: int = 0
    tier_errors: int = 0
    verified_chunks: int = 0
    differing_chunks: int = 0
    unverified_chunks: int = 0
    corrupt_records: dict[int, int] = field(default_factory=dict)
    scrubbed_records: dict[int, int] = field(default_factory=dict)
    scrubbed_bytes: dict[int, int] = field(default_factory=dict)
    scrub_damaged: dict[int, int] = field(default_factory=dict)
    set_aside: dict[int, int] = field(default_factory=dict)
    refused_records: dict[int, int] = field(default_factory=dict)
    read_bytes: dict[int, int] = field(default_factory=dict)
    read_seconds: dict[int, float] = field(default_factory=dict)
    write_bytes: dict[int, int] = field(default_factory=dict)
    write_seconds: dict[int, float] = field(default_factory=dict)

    def copied(self, *, stored_bytes: int = 0, store_s: float = 0.0, loaded_bytes: int = 0) -> None:
        """Count bytes that were copied between the KV cache and the CPU tier."""
        self.store_bytes += stored_bytes
        self.store_seconds += store_s
        self.load_bytes += loaded_bytes

    def load_ended(self, seconds: float) -> None:
        """Count the time of one load, whether it has succeeded or not."""
        self.load_seconds += seconds

    def copies_failed(self, failures: int) -> None:
        """Set the number of copies that have failed unexpectedly so far."""
        self.copy_failures = failures

    def load_timed_out(self) -> None:
        """Count a load whose request stopped waiting for it."""
        self.load_timeouts += 1

    def fences_timed_out(self, count: int) -> None:
        """Count stores that had not read their blocks when their fence gave up waiting."""
        self.fence_timeouts += count

    def tier_failed(self) -> None:
        """Count an operation of a lower tier that has raised an error."""
        self.tier_errors += 1

    def verified(self, *, good: int = 0, differing: int = 0, unknown: int = 0) -> None:
        """Count loaded chunks: the ``good`` and ``differing`` ones were compared with those
        computed, the ``unknown`` ones could not be."""
        self.verified_chunks += good
        self.differing_chunks += differing
        self.unverified_chunks += unknown

    def corrupt(self, tier: int) -> None:
        """Count a record that failed verification."""
        self.corrupt_records[tier] = self.corrupt_records.get(tier, 0) + 1

    def scrubbed(self, tier: int, records: int, nbytes: int, damaged: int) -> None:
        """Count records that were verified while the tier was idle."""
        for counter, count in (
            (self.scrubbed_records, records),
            (self.scrubbed_bytes, nbytes),
            (self.scrub_damaged, damaged),
            (self.corrupt_records, damaged),
        ):
            counter[tier] = counter.get(tier, 0) + count

    def opened(self, tier: int, counts: Mapping[str, int], set_aside: int) -> None:
        """Count a tier that was opened.

        ``counts`` are its own; ``set_aside`` is the number of folders that were moved out of its
        way.
        """
        self.refused_records[tier] = counts.get("dropped_at_open", 0)
        self.set_aside[tier] = counts.get("quarantined", 0) + set_aside

    def lost(self, tier: int) -> None:
        """Count a tier that was reopened and has lost all its records."""
        self.set_aside[tier] = self.set_aside.get(tier, 0) + 1

    def read(self, tier: int, nbytes: int, seconds: float) -> None:
        """Count one batch read from a lower tier."""
        self.read_bytes[tier] = self.read_bytes.get(tier, 0) + nbytes
        self.read_seconds[tier] = self.read_seconds.get(tier, 0.0) + seconds

    def wrote(self, tier: int, nbytes: int, seconds: float, *, failures: int = 0) -> None:
        """Count one batch written to a lower tier; ``failures`` of its chunks were not written."""
        self.write_failures += failures
        self.write_bytes[tier] = self.write_bytes.get(tier, 0) + nbytes
        self.write_seconds[tier] = self.write_seconds.get(tier, 0.0) + seconds

    def totals(self) -> dict[str, float]:
        """All counters by flat name; those of a tier end in ``:`` and its number. May be called
        while another thread counts: dicts are copied in one step, because a tier's first count adds
        an entry."""
        flat: dict[str, float] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, dict):
                flat |= {f"{name}:{tier}": amount for tier, amount in value.copy().items()}
            else:
                flat[name] = value
        return flat

"""Whether a lower tier is asked at all: its breakers, and whether loading from it pays.

One gate per lower tier, owned by the planner. A gate that is shut costs nothing: the tier is
left out of lookups, nothing is written to it, and only a probe goes to it from time to time.
Every change is one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from offload.messages.report import Observed
from offload.planner.circuit_breaker import BreakerState, CircuitBreaker
from offload.planner.load_or_recompute import LoadOrRecompute, Rate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """``failures`` in a row open a breaker; ``break_even``: compare loading with computing, where
    chunks have at most ``chunk_tokens``."""

    failures: int = 3
    break_even: bool = True
    chunk_tokens: int = 0


class TierHealth:
    """See the module. ``probe`` is the job that asks whether reading works or pays again."""

    def __init__(self, name: str, prefill: Rate, limits: HealthLimits) -> None:
        self.reads = CircuitBreaker(limits.failures)
        self.writes = CircuitBreaker(limits.failures)
        self.pace = LoadOrRecompute(
            prefill, enabled=limits.break_even, chunk_tokens=limits.chunk_tokens
        )
        self.probe: int | None = None
        self.name = name
        self._said = self._state()

    @property
    def readable(self) -> bool:
        """Whether hits may come from this tier."""
        return self.reads.closed and self.pace.pays

    @property
    def writable(self) -> bool:
        """Whether chunks may be queued for this tier."""
        return self.writes.state is not BreakerState.OPEN

    def tick(self, now: float) -> bool:
        """Let time pass; whether a read should be tried now."""
        self.reads.tick(now)
        self.writes.tick(now)
        self.pace.tick(now)
        self._log()
        if self.probe is not None:
            return False
        return self.reads.state is BreakerState.HALF_OPEN or (
            self.reads.closed and self.pace.probe_due(now)
        )

    def observe(self, rank: int, seen: Observed, now: float) -> None:
        """What one rank saw of this tier."""
        self.reads.observe(seen.reads_good, seen.reads_failed, now, rank)
        self.writes.observe(seen.writes_good, seen.writes_failed, now, rank)
        self._log()

    def written(self, now: float, *, good: bool) -> None:
        """A write has been answered by every rank."""
        self.writes.judge(now, good=good)
        self._log()

    def loaded(self, tokens: int, seconds: float, now: float) -> None:
        """A load of a request with this tier as its slowest source ended well."""
        self.pace.observe_load(tokens, seconds, now)
        self._log()

    def too_late(self, tokens: int, seconds: float, now: float) -> None:
        """A load with this tier as its slowest source took longer than its request waited, which
        had to compute its prompt after all."""
        self.pace.observe_late(tokens, seconds, now)
        self._log()

    def probed(self, tokens: int, seconds: float, now: float, *, good: bool) -> None:
        """The probe has been answered by every rank; ``tokens`` is what it brought."""
        self.probe = None
        self.reads.judge(now, good=good)
        self.pace.observe_probe(tokens if good else 0, seconds, now)
        self._log()

    def asked(self, now: float, *, good: bool) -> None:
        """The probe of a shared tier, which is only asked what it holds, has ended."""
        self.probe = None
        self.reads.judge(now, good=good)
        self._log()

    def _state(self) -> tuple[BreakerState, BreakerState, bool]:
        return self.reads.state, self.writes.state, self.pace.pays

    def _log(self) -> None:
        before, now = self._said, self._state()
        if before == now:
            return
        self._said = now
        for what, old, new in (("read", before[0], now[0]), ("written", before[1], now[1])):
            if new is BreakerState.OPEN and old is BreakerState.CLOSED:
                logger.warning(
                    "kvtiers: tier %s fails and is not %s any more; it is tried again from time "
                    "to time",
                    self.name,
                    what,
                )
            elif new is BreakerState.CLOSED and old is not BreakerState.CLOSED:
                logger.warning("kvtiers: tier %s is %s again", self.name, what)
        if before[2] and not now[2]:
            logger.warning(
                "kvtiers: loading from tier %s is slower than computing; it is not read until it "
                "is faster",
                self.name,
            )
        elif now[2] and not before[2]:
            logger.warning("kvtiers: loading from tier %s pays again", self.name)


class TierHealths:
    """The gates of all lower tiers, and the rate of computing that they are measured against."""

    def __init__(self, names: Sequence[str], limits: HealthLimits | None = None) -> None:
        self.prefill = Rate()
        limits = limits or HealthLimits()
        self.tiers = tuple(TierHealth(name, self.prefill, limits) for name in names)

    def totals(self) -> dict[str, float]:
        """How often each tier's breakers have opened, by flat name."""
        return {
            f"breaker_openings:{gate.name}": gate.reads.openings + gate.writes.openings
            for gate in self.tiers
        }

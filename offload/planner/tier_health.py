"""The health of the lower tiers: circuit breakers, and whether loading from a tier pays.

A tier whose breaker is open, or from which loading does not pay, costs nothing: lookups skip it,
nothing is written to it, and only an occasional probe is sent to it. Every change is one line in
the log. Pure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.messages.report import Observed
from offload.planner.circuit_breaker import BreakerState, CircuitBreaker
from offload.planner.load_or_recompute import LoadOrRecompute, Rate

logger = logging.getLogger(__name__)

PATIENT_SHARE = 0.5
"""A request waits for other loads only if its own load then ends within this share of the time that
computing would take."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """``failures`` consecutive failures open a circuit breaker. With ``break_even``, the speed of
    loading is compared with that of computing; ``chunk_tokens`` is the maximum length of a
    chunk. Loads fail after ``load_timeout_s``."""

    failures: int = 3
    break_even: bool = True
    chunk_tokens: int = 0
    load_timeout_s: float = math.inf


class TierHealth:
    """The health of one lower tier. Owned by ``TierHealths``; used on vLLM's scheduler thread.

    ``probe`` is the open job that tests whether reading works again, or is faster than computing
    again.
    """

    def __init__(self, name: str, prefill: Rate, limits: HealthLimits) -> None:
        self.reads = CircuitBreaker(limits.failures)
        self.writes = CircuitBreaker(limits.failures)
        self.break_even = LoadOrRecompute(
            prefill,
            enabled=limits.break_even,
            chunk_tokens=limits.chunk_tokens,
            timeout_s=limits.load_timeout_s,
        )
        self.probe: int | None = None
        self._is_probe_due = False
        self.name = name
        self._logged = self._state()

    @property
    def readable(self) -> bool:
        """True if hits may come from this tier."""
        return self.reads.closed and self.break_even.pays

    @property
    def readable_ahead(self) -> bool:
        """True if this tier may be read for requests that wait anyway. If it is slower than
        computing, it is not read during a probe, which would measure only a part of its speed."""
        if not self.reads.closed or self.break_even.pays:
            return self.reads.closed
        is_probed = self._is_probe_due or self.probe is not None
        return not is_probed and self.break_even.pays_ahead

    @property
    def writable(self) -> bool:
        """True if chunks may be queued for this tier."""
        return self.writes.state is not BreakerState.OPEN

    def tick(self, now: float) -> bool:
        """Let time pass; returns whether a probe is due."""
        self._is_probe_due = False
        if self.break_even.short:
            self.break_even.tick(now)
        if self.reads.closed and self.writes.closed and self.break_even.pays:
            return False
        self.reads.tick(now)
        self.writes.tick(now)
        self._log()
        if self.probe is not None:
            return False
        self._is_probe_due = self.reads.state is BreakerState.HALF_OPEN or (
            self.reads.closed and self.break_even.probe_due(now)
        )
        return self._is_probe_due

    @property
    def breaker_state(self) -> BreakerState:
        """The worse state of the two circuit breakers."""
        return max(self.reads.state, self.writes.state, key=lambda state: state.value)

    def begin_probe(self, job: int | None) -> None:
        """Record that a probe was planned, or with ``None`` that the tier has no chunks to read."""
        self.probe = job

    def drop_probe(self) -> None:
        """Record that the probe had no meaningful result; another one can be planned."""
        self.probe = None

    def observe(self, rank: int, seen: Observed, now: float) -> None:
        """Count the results of one rank's operations on this tier."""
        if seen.reads_good or seen.reads_failed:
            self.reads.observe(seen.reads_good, seen.reads_failed, now, rank)
        if seen.writes_good or seen.writes_failed:
            self.writes.observe(seen.writes_good, seen.writes_failed, now, rank)
        self._log()

    def written(self, now: float, *, good: bool) -> None:
        """Count a write that every rank has answered."""
        if not self.writes.closed:
            self.writes.judge(now, good=good)
            self._log()

    def loaded(self, tokens: int, seconds: float, now: float, before: int = 0) -> None:
        """Count a successful load whose slowest source was this tier; see
        ``LoadOrRecompute.observe_load``."""
        self.break_even.observe_load(tokens, seconds, now, before)
        self._log()

    def too_late(self, tokens: int, seconds: float, now: float) -> None:
        """Count a load that missed its deadline and whose slowest source was this tier; its prompt
        was recomputed."""
        self.break_even.observe_late(tokens, seconds, now)
        self._log()

    def probed(self, tokens: int, seconds: float, now: float, *, good: bool) -> None:
        """Count a probe of ``tokens`` that every rank has answered."""
        self.probe = None
        self.reads.judge(now, good=good)
        self.break_even.observe_probe(tokens if good else 0, seconds, now)
        self._log()

    def probe_answered(self, now: float, *, good: bool) -> None:
        """Count the probe of a shared tier, which is a presence query."""
        self.probe = None
        self.reads.judge(now, good=good)
        self._log()

    def _state(self) -> tuple[BreakerState, BreakerState, bool]:
        """The states of reads and writes, and whether loading pays."""
        return self.reads.state, self.writes.state, self.break_even.pays

    def _log(self) -> None:
        now = self._state()
        if now == self._logged:
            return
        (reads_before, writes_before, paid), self._logged = self._logged, now
        reads, writes, pays = now
        for what, old, new in (("read", reads_before, reads), ("written", writes_before, writes)):
            if new is BreakerState.OPEN and old is BreakerState.CLOSED:
                logger.warning(
                    "kvtiers: tier %s failed and is no longer %s; it is probed from time to time",
                    self.name,
                    what,
                )
            elif new is BreakerState.CLOSED and old is not BreakerState.CLOSED:
                logger.warning("kvtiers: tier %s is %s again", self.name, what)
        if paid and not pays:
            logger.warning(
                "kvtiers: loading from tier %s is slower than computing; until it is faster, the "
                "tier is only read ahead, for requests that wait",
                self.name,
            )
        elif pays and not paid:
            logger.warning(
                "kvtiers: loading from tier %s is faster than computing again", self.name
            )


class TierHealths:
    """The health of all lower tiers by number (``tiers``), and the rate of computing that loads are
    compared with. A request waits ``load_timeout_s`` at most for a load. Owned by the planner; used
    on vLLM's scheduler thread."""

    def __init__(self, names: Sequence[str], limits: HealthLimits | None = None) -> None:
        self._prefill = Rate()
        limits = limits or HealthLimits()
        self.load_timeout_s = limits.load_timeout_s
        self._break_even = limits.break_even
        self.tiers = tuple(TierHealth(name, self._prefill, limits) for name in names)

    def __getitem__(self, tier: int) -> TierHealth:
        return self.tiers[tier]

    def due(self, now: float) -> list[int]:
        """Let time pass; return the tiers for which a probe is due."""
        return [number for number, tier in enumerate(self.tiers) if tier.tick(now)]

    def readable_tiers(self) -> list[int]:
        """The tiers that hits may come from."""
        return [number for number, tier in enumerate(self.tiers) if tier.readable]

    def ahead_tiers(self) -> list[int]:
        """The tiers that may be read for requests that wait anyway. Those that hits may come from
        are first."""
        tiers = [n for n, tier in enumerate(self.tiers) if tier.readable_ahead]
        return sorted(tiers, key=lambda number: not self.tiers[number].readable)

    def patience_s(self, tokens: Mapping[int, int], computing: int) -> float:
        """The time for which a request may wait for the loads in flight, which must end before its
        own load of these tokens (by tier). ``computing`` counts the tokens that vLLM computes for
        others first.

        This is the time that computing the tokens would take, so a useless wait at most doubles
        that time. The result is 0 if a speed is not known. It is also 0 if the reads before the
        load and its own would probably take more than ``PATIENT_SHARE`` of that time, because the
        model could compute while the tier reads for others. If loading is never compared with
        computing, the result is ``load_timeout_s``.
        """
        if not self._break_even:
            return self.load_timeout_s
        prefill = self._prefill.value()
        if prefill is None:
            return 0.0
        compute_s = (computing + sum(tokens.values())) / prefill
        for number, tier in enumerate(self.tiers):
            due = tier.break_even.reads.tokens + tokens.get(number, 0)
            speed = tier.break_even.least_speed
            if due and (speed is None or due / speed > PATIENT_SHARE * compute_s):
                return 0.0
        return min(compute_s, self.load_timeout_s)

    @property
    def prefill_rate(self) -> float | None:
        """Tokens computed per second, once measured."""
        return self._prefill.value()

    def computed(self, tokens: int, seconds: float) -> None:
        """Record that a prompt of ``tokens`` was computed; ``seconds`` is its time to first
        token."""
        self._prefill.observe(tokens, seconds)

    def totals(self) -> dict[str, float]:
        """The number of times that each tier's circuit breakers have opened, by flat name."""
        return {
            f"breaker_openings:{tier.name}": tier.reads.openings + tier.writes.openings
            for tier in self.tiers
        }

"""Decides whether loading is faster than computing, from measured rates and with hysteresis.

Rates are in tokens per second. The rate of computing is the number of tokens that a request
computes, divided by its time to first token, which includes the effect of other requests. The rate
of a tier is the number of tokens that it delivers during a load, to this load and to those that
were in flight before it. Pure: times come from the caller.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from enum import Enum

TOKENS_MIN = 256
"""Minimum length of a computation or load that is measured: shorter ones show fixed costs rather
than rates."""
SAMPLES_MIN = 3
SAMPLES_KEPT = 8
STOP_BELOW = 0.9
RESUME_ABOVE = 1.1
RETRY_S = 5.0
RETRY_MAX_S = 60.0
FORGET_S = 60.0
"""Time for which the durations of short loads are remembered."""
AHEAD_SHARE = 0.25
"""A tier that is slower than this share of computing is not read ahead: it would save little, and
each of its reads would take long."""
DEADLINE_SHARE = 0.5
"""Share of the time allowed for a load within which its reads are expected to end."""


class ShortenReason(Enum):
    """Why less is loaded than the tiers hold, as a note for ``kvtiers why``."""

    NOTHING = ""
    SHORT = "too few tokens to query that tier for"
    QUEUE = "computing is faster than waiting for the other loads from that tier"
    DEADLINE = "the rest cannot be read within load_timeout_s"
    LATE = "the rest was not read within load_timeout_s while the request waited"


class Rate:
    """Median of the last few rates, in tokens per second; ``None`` while too little is known."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)

    def observe(self, tokens: int, seconds: float) -> None:
        """Add one measurement; short pieces of work are ignored."""
        if tokens >= TOKENS_MIN and seconds > 0:
            self._samples.append(tokens / seconds)

    def value(self) -> float | None:
        """The rate, once enough has been measured."""
        if len(self._samples) < SAMPLES_MIN:
            return None
        return statistics.median(self._samples)

    def clear(self) -> None:
        """Forget all measurements, because they are no longer valid."""
        self._samples.clear()


class ReadQueue:
    """The tokens that each load in flight reads from one tier, by job.

    The model: a tier delivers a fixed number of tokens per second, which the loads in flight share
    equally. While a load of ``n`` tokens is read, a load that was there before it receives at most
    ``n`` tokens.
    """

    def __init__(self) -> None:
        self._reads: dict[int, int] = {}

    def __len__(self) -> int:
        """The number of loads in flight."""
        return len(self._reads)

    @property
    def tokens(self) -> int:
        """The tokens of all loads in flight."""
        return sum(self._reads.values())

    def begin(self, job: int, tokens: int) -> int:
        """Record that this load begins to read ``tokens`` tokens; returns ``before`` for it."""
        before = self.before(tokens)
        self._reads[job] = tokens
        return before

    def end(self, job: int) -> None:
        """Record that no request waits for this load any more."""
        self._reads.pop(job, None)

    def before(self, tokens: int) -> int:
        """The tokens that loads in flight receive while a load of ``tokens`` is read."""
        return sum(min(other, tokens) for other in self._reads.values())

    def part(self, tokens_max: float) -> int:
        """The length of the longest load that is read completely within ``tokens_max`` delivered
        tokens, which include those of the loads before it."""
        others = sorted(self._reads.values())
        while others and others[0] * (len(others) + 1) < tokens_max:
            tokens_max -= others.pop(0)
        return max(0, int(tokens_max / (len(others) + 1)))


class LoadOrRecompute:
    """Decides whether one tier provides tokens faster than the model computes them.

    Loading pays if it is faster than computing. It stops paying below ``STOP_BELOW`` times the rate
    of computing and pays again above ``RESUME_ABOVE`` times that rate. While it does not pay, only
    probes measure the tier. Probes see less traffic than loads, so the waits between probes double
    until real loads have shown that loading is faster.

    ``chunk_tokens`` is the maximum number of tokens in a chunk: a load of two chunks is short,
    whatever their size. Even if loading is faster than computing, it may be too slow for a few
    tokens: ``tokens_min``. ``short`` has the times and durations of the last short loads. ``reads``
    are the loads in flight, ``ahead_rate`` is the rate of reads ahead. No load is planned that
    would probably take longer than ``timeout_s``.
    """

    def __init__(
        self,
        prefill: Rate,
        *,
        enabled: bool = True,
        chunk_tokens: int = 0,
        timeout_s: float = math.inf,
    ) -> None:
        self.pays = True
        self.rate = Rate()
        self.ahead_rate = Rate()
        self.reads = ReadQueue()
        self._probed: float | None = None
        self.timeout_s = timeout_s
        self._prefill = prefill
        self._enabled = enabled
        self._wait_s = RETRY_S
        self._retry_at = 0.0
        self._short_tokens = max(TOKENS_MIN - 1, 2 * chunk_tokens)
        self.short: deque[tuple[float, float]] = deque(maxlen=SAMPLES_KEPT)

    @property
    def tokens_min(self) -> float:
        """Below this number of tokens, a request should compute its prompt instead of loading it.

        This is the number of tokens that can be computed in the time of a short load. It is 0 if
        that time is unknown.
        """
        if not self._enabled or len(self.short) < SAMPLES_MIN:
            return 0.0
        prefill = self._prefill.value()
        if prefill is None:
            return 0.0
        return STOP_BELOW * prefill * statistics.median(took for _, took in self.short)

    @property
    def speed(self) -> float | None:
        """The rate at which the tier delivers: that of its loads or, while too few have been
        measured since the last probe, that of the probe."""
        return self.rate.value() or self._probed

    @property
    def least_speed(self) -> float | None:
        """``speed`` or, if it is not known, that of reads ahead. These read less at a time, so
        loads are not slower."""
        return self.speed or self.ahead_rate.value()

    @property
    def pays_ahead(self) -> bool:
        """True if the tier should be read for requests that wait anyway: each chunk that arrives in
        time need not be computed, even if computing it would take less time than reading it."""
        speed, prefill = self.speed, self._prefill.value()
        return self.pays or (speed or 0.0) >= AHEAD_SHARE * (prefill or 0.0) > 0

    def may_cut(self, tokens: int) -> bool:
        """True if a hit of ``tokens`` might have to be shortened; False if all of it is loaded."""
        speed = self.speed
        if speed is None:
            return self.tokens_min > 0
        is_long = tokens > DEADLINE_SHARE * self.timeout_s * speed
        return is_long or len(self.reads) > 0 or self.tokens_min > 0

    def part(self, tokens: int, computing: int | None) -> tuple[int, ShortenReason]:
        """The number of ``tokens`` that are worth reading from this tier for a request.

        ``computing`` is the number of tokens that vLLM computes for others first, or ``None`` if
        the request waits anyway: then the loads before it do not matter. The answer is all, none,
        or as many as can be read in time. Each further token read leaves less to compute, so no
        other number is best (decision 0093).
        """
        speed = self.speed
        if speed is not None and computing is not None:
            before = self.reads.before(tokens)
            read_s = (before + tokens) / speed
            compute_s = self.compute_s(tokens, computing) if before else None
            if compute_s is not None and read_s > compute_s:
                return 0, ShortenReason.QUEUE
            allowed_s = DEADLINE_SHARE * self.timeout_s
            if read_s > allowed_s:
                in_time = min(tokens, self.reads.part(allowed_s * speed))
                return (
                    (in_time, ShortenReason.DEADLINE)
                    if in_time >= self.tokens_min
                    else (0, ShortenReason.DEADLINE)
                )
        return (
            (tokens, ShortenReason.NOTHING)
            if tokens >= self.tokens_min
            else (0, ShortenReason.SHORT)
        )

    @property
    def is_compared(self) -> bool:
        """True if a request may compute instead of waiting for other loads."""
        return self._enabled and self._prefill.value() is not None

    def compute_s(self, tokens: int, computing: int) -> float | None:
        """The time after which ``tokens`` would be computed, if vLLM computes ``computing`` tokens
        for others first. ``None``: unknown, or computing is not compared with loading."""
        prefill = self._prefill.value() if self._enabled else None
        if prefill is None:
            return None
        return (computing + tokens) / (STOP_BELOW * prefill)

    def tick(self, now: float) -> None:
        """Set the time. This forgets old durations of short loads, so loading is tried again."""
        while self.short and self.short[0][0] < now - FORGET_S:
            self.short.popleft()

    def observe_load(self, tokens: int, seconds: float, now: float, before: int = 0) -> None:
        """Count a successful load from this tier; meanwhile the tier delivered ``before`` tokens to
        other loads."""
        if tokens >= TOKENS_MIN:
            self.rate.observe(before + tokens, seconds)
        if tokens <= self._short_tokens:
            self.short.append((now, seconds))
        prefill, mine = self._prefill.value(), self.rate.value()
        if not self._enabled or not self.pays or prefill is None or mine is None:
            return
        if mine < STOP_BELOW * prefill:
            self.pays = False
            self._retry_at = now + self._wait_s
        else:
            self._wait_s = RETRY_S

    def observe_late(self, tokens: int, seconds: float, now: float) -> None:
        """Count a load from this tier that took longer than a request waits. Its rate replaces all
        earlier measurements."""
        self.rate.clear()
        for _ in range(SAMPLES_MIN):
            self.observe_load(tokens, seconds, now)

    def observe_probe(self, tokens: int, seconds: float, now: float) -> None:
        """Count a probe that has ended; only probes decide whether to try loading again."""
        if self.pays:
            return
        self._wait_s = min(2 * self._wait_s, RETRY_MAX_S)
        prefill, rate = self._prefill.value(), tokens / max(seconds, 1e-9)
        if tokens:
            self.rate.clear()
            self._probed = rate
        if tokens and (prefill is None or rate > RESUME_ABOVE * prefill):
            self.pays = True
        else:
            self._retry_at = now + self._wait_s

    def probe_due(self, now: float) -> bool:
        """True if the tier should be measured again."""
        return not self.pays and now >= self._retry_at

"""A circuit breaker: after consecutive failures, only probes are sent.

    CLOSED --failures--> OPEN --wait--> HALF_OPEN --good--> CLOSED
                          ^                 |
                          +-----failed------+   (the wait doubles)

Pure: the caller passes the time.
"""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """The states of a breaker; their numbers are the metric's values."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """``failures`` consecutive failures open the breaker. The first wait is ``wait_s``, the longest
    ``wait_max_s``. ``closed`` is true in the state ``CLOSED``."""

    def __init__(self, failures: int = 3, wait_s: float = 5.0, wait_max_s: float = 60.0) -> None:
        self.state = BreakerState.CLOSED
        self.closed = True
        self.openings = 0
        self._failures_max = failures
        self._first_wait_s = self._wait_s = wait_s
        self._wait_max_s = wait_max_s
        self._failures: dict[int, int] = {}  # consecutive failures by rank
        self._retry_at = 0.0

    def observe(self, good: int, failed: int, now: float, rank: int = 0) -> None:
        """Count the operations of one rank that succeeded, and those that failed or were late.

        Ranks are counted separately: a request needs its chunks from every rank, so one broken disk
        costs as many hits as if all disks were broken.
        """
        if self.state is BreakerState.CLOSED:
            if good:
                self._failures[rank] = failed if failed > good else 0
            else:
                self._failures[rank] = self._failures.get(rank, 0) + failed
            if self._failures[rank] >= self._failures_max:
                self.openings += 1
                self._open(now, self._first_wait_s)
        elif self.state is BreakerState.HALF_OPEN and failed:
            self._open(now, min(2 * self._wait_s, self._wait_max_s))
        # OPEN: this operation began before the breaker opened, and now only the probe counts

    def judge(self, now: float, *, good: bool) -> None:
        """Count the result of a probe that every rank has answered. Only a successful probe closes
        the breaker."""
        if self.state is BreakerState.HALF_OPEN:
            if good:
                self._enter(BreakerState.CLOSED)
            else:
                self._open(now, min(2 * self._wait_s, self._wait_max_s))

    def tick(self, now: float) -> None:
        """Set the time, which may end the wait for the next probe."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self._enter(BreakerState.HALF_OPEN)

    def _enter(self, state: BreakerState) -> None:
        self.state = state
        self.closed = state is BreakerState.CLOSED

    def _open(self, now: float, wait_s: float) -> None:
        self._enter(BreakerState.OPEN)
        self._wait_s = wait_s
        self._retry_at = now + wait_s
        self._failures.clear()

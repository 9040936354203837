"""A circuit breaker: after failures in a row nothing is asked any more, except by a probe.

    CLOSED --failures--> OPEN --wait--> HALF_OPEN --good--> CLOSED
                          ^                 |
                          +-----failed------+   (the wait doubles)

Pure: whoever drives it says what time it is.
"""

from __future__ import annotations

import enum


class Circuit(enum.Enum):
    """The states of a breaker; the numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """``failures`` in a row open it; the first wait is ``wait_s``, the longest ``wait_max_s``."""

    def __init__(self, failures: int = 3, wait_s: float = 5.0, wait_max_s: float = 60.0) -> None:
        self.state = Circuit.CLOSED
        self.openings = 0
        self._failures_max = failures
        self._first_wait_s = self._wait_s = wait_s
        self._wait_max_s = wait_max_s
        self._failures = 0
        self._retry_at = 0.0

    @property
    def closed(self) -> bool:
        return self.state is Circuit.CLOSED

    def observe(self, good: int, failed: int, now: float) -> None:
        """Take in how many operations went well and how many failed or came late."""
        if self.state is Circuit.CLOSED:
            if good:
                self._failures = failed if failed > good else 0
            else:
                self._failures += failed
            if self._failures >= self._failures_max:
                self.openings += 1
                self._open(now, self._first_wait_s)
        elif self.state is Circuit.HALF_OPEN:
            if failed:
                self._open(now, min(2 * self._wait_s, self._wait_max_s))
            elif good:
                self.state = Circuit.CLOSED
        # OPEN: it was begun before it opened; what counts now is the probe

    def tick(self, now: float) -> None:
        """The wait may be over."""
        if self.state is Circuit.OPEN and now >= self._retry_at:
            self.state = Circuit.HALF_OPEN

    def _open(self, now: float, wait_s: float) -> None:
        self.state = Circuit.OPEN
        self._wait_s = wait_s
        self._retry_at = now + wait_s
        self._failures = 0

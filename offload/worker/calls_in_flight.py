"""Limits the calls of one kind that a tier gets at a time: a tier that responds quickly gets more.

Many calls at a time keep a fast disk busy: small records need more of them than large ones. On a
slow disk they would only wait for each other, until each of them counts as late.
"""

from __future__ import annotations

CALLS_MIN, CALLS_MAX = 4, 16
QUICK_S, SLOW_S = 0.25, 1.0
"""A tier gets one more call at a time after each call that takes less than the first time, and half
as many after a call that takes longer than the second."""


class CallsInFlight:
    """The limit for one tier. ``calls_max`` is the highest."""

    def __init__(self, calls_max: int = CALLS_MAX) -> None:
        self._min, self._max = min(CALLS_MIN, calls_max), calls_max
        self.limit = self._min

    def ended(self, seconds: float) -> None:
        """Record the duration of a call."""
        if seconds <= QUICK_S:
            self.limit = min(self._max, self.limit + 1)
        elif seconds > SLOW_S:
            self.limit = max(self._min, self.limit // 2)

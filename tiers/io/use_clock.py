"""Times of last use: strictly increasing nanoseconds since 1970, which both order and date records.

If the system clock is set back, each time is the previous one plus one, so the order is kept. Early
versions stored small counters instead, which give an order but no age.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DATED_FROM_NS = 10**18
"""A smaller value (before September 2001) is a counter and not a time."""


class UseClock:
    """Hands out times of use, each greater than all earlier ones."""

    def __init__(self, first: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``first`` must be greater than every time of use in the tier."""
        self._next = first
        self._now_ns = now_ns

    def take(self, count: int) -> range:
        """Return ``count`` consecutive times, for records in the order of their use."""
        first = max(self._next, self._now_ns())
        self._next = first + count
        return range(first, self._next)

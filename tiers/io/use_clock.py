"""Times of use: nanoseconds since 1970 that only grow, so that they order as well as date.

A clock that is set back does not reorder anything: then each use is one more than the last. Stores
written by early versions hold small counters instead; they order, but tell no age.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DATED_FROM_NS = 10**18
"""A use below this (September 2001) is a counter and no time."""


class UseClock:
    """Hands out times of use, each greater than all before it."""

    def __init__(self, first: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``first`` is greater than every use there is."""
        self._next = first
        self._now_ns = now_ns

    def take(self, count: int) -> range:
        """``count`` consecutive times for records in the order of their use."""
        first = max(self._next, self._now_ns())
        self._next = first + count
        return range(first, self._next)

"""Admission policies: which chunks may enter a tier. They are for tiers whose writes are
expensive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

from policies.base import AdmissionPolicy, EntryInfo, Key
from policies.eviction._queues import GhostList
from policies.options import Range
from policies.sketch import COUNT_MAX, FrequencySketch


class AdmitAll(AdmissionPolicy):
    """Admits every chunk."""

    def admit(self, key: Key, info: EntryInfo) -> bool:
        return True


class SecondUse(AdmissionPolicy):
    """Admits a chunk if it is among the last ``window`` keys that were refused.

    Prefixes stay closed, because the head of a prefix is offered at least as often as its tail (T.
    Johnson and D. Shasha's 2Q, VLDB 1994, has the same filter in its A1out queue).
    """

    def __init__(self, window: Annotated[int, Range(1, 1 << 28)] = 1_000_000) -> None:
        self._window = window
        self._refused = GhostList()

    def admit(self, key: Key, info: EntryInfo) -> bool:
        if key in self._refused:
            return True
        self._refused.add(key)
        self._refused.trim(self._window)
        return False


class FrequencyAdmission(AdmissionPolicy):
    """Admits a chunk if it was offered at least ``uses`` times recently.

    A sketch for about ``width`` keys counts the offers. It needs 8 bytes per key, while
    ``SecondUse`` needs the keys themselves.
    """

    def __init__(
        self,
        uses: Annotated[int, Range(1, COUNT_MAX)] = 2,
        width: Annotated[int, Range(1, 1 << 28)] = 1 << 20,
    ) -> None:
        self._uses = uses
        self._sketch = FrequencySketch(width)

    def admit(self, key: Key, info: EntryInfo) -> bool:
        return self._sketch.add(key) >= self._uses


class WriteBudget(AdmissionPolicy):
    """Admits at most ``bytes_per_s`` on average and ``burst_bytes`` at once (a token bucket).

    This protects a disk's endurance, at the cost of hits when the budget is used up.
    """

    def __init__(
        self,
        bytes_per_s: Annotated[float, Range(0, above=True)],
        burst_bytes: Annotated[float, Range(0)] = 0.0,
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s must be positive (got {bytes_per_s})")
        self._clock: Callable[[], float] = time.monotonic
        self._rate = bytes_per_s
        self._left_max = burst_bytes or 10 * bytes_per_s
        self._left = self._left_max
        self._filled_s: float | None = None

    def admit(self, key: Key, info: EntryInfo) -> bool:
        now = self._clock()
        if self._filled_s is not None:
            self._left = min(self._left_max, self._left + (now - self._filled_s) * self._rate)
        self._filled_s = now
        if self._left < info.size_bytes:
            return False
        self._left -= info.size_bytes
        return True

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._clock = clock

"""Segmented LRU: a reuse promotes from the probation to the protected segment.

R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance",
IEEE Computer 27(3), 1994.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take
from policies.options import Range


class SlruPolicy(EvictionPolicy):
    """Two LRU lists. O(1) per key. ``protected_share`` limits the protected list, as a share of the
    capacity."""

    def __init__(self, protected_share: Annotated[float, Range(0, 1)] = 0.8) -> None:
        self._share = protected_share
        self._probation: OrderedDict[Key, bool] = (
            OrderedDict()
        )  # value: true if touched since it was inserted
        self._protected: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._probation[key] = False

    def touch(self, keys: Sequence[Key]) -> None:
        probation, protected = self._probation, self._protected
        for key in reversed(keys):
            if key in protected:
                protected.move_to_end(key)
            elif key in probation:
                if probation.pop(key):
                    protected[key] = None
                else:
                    probation[key] = True
        limit = self._share * len(self)
        while len(protected) > limit:
            oldest = next(iter(protected))
            del protected[oldest]
            probation[oldest] = True

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        take(self._probation, count, evictable, found)
        take(self._protected, count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._probation.pop(key, None) is None:
            self._protected.pop(key, None)

    def clear(self) -> None:
        self._probation.clear()
        self._protected.clear()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

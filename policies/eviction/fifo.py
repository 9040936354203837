"""First in, first out: the classic baseline of cache research.

L. A. Belady, R. A. Nelson, G. S. Shedler, "An anomaly in space-time characteristics of certain
programs running in a paging machine", CACM 12(6), 1969.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take


class FifoPolicy(EvictionPolicy):
    """An ``OrderedDict`` in order of insertion. All operations are O(1) per key."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._order[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        """A use changes nothing."""

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        take(self._order, count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        self._order.pop(key, None)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

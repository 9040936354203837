"""2Q: only keys that return after leaving the short queue enter the long queue.

T. Johnson, D. Shasha, "2Q: A low overhead high performance buffer management replacement
algorithm", VLDB 1994 (the full version, with A1in, A1out and Am).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import GhostList, take
from policies.options import Range


class TwoQueuePolicy(EvictionPolicy):
    """A FIFO for newcomers, its ghosts, and an LRU for keys that returned. O(1) per key.

    ``entry_share`` is the newcomers' share of the capacity, and ``ghost_share`` the number of
    ghosts as a share of the capacity. The defaults, 0.25 and 0.5, are from the paper.
    """

    def __init__(
        self,
        entry_share: Annotated[float, Range(0, 1)] = 0.25,
        ghost_share: Annotated[float, Range(0, 10)] = 0.5,
    ) -> None:
        self._entry_share = entry_share
        self._ghost_share = ghost_share
        self._entry: OrderedDict[Key, None] = OrderedDict()
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._ghosts = GhostList()

    def insert(self, key: Key, info: EntryInfo) -> None:
        if self._ghosts.discard(key):
            self._main[key] = None
        else:
            self._entry[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        main = self._main
        for key in reversed(keys):
            if key in main:
                main.move_to_end(key)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        kept = int(self._entry_share * len(self))
        take(self._entry, min(count, max(0, len(self._entry) - kept)), evictable, found)
        take(self._main, count, evictable, found)
        if len(found) < count:
            chosen = set(found)
            take((key for key in self._entry if key not in chosen), count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if key in self._entry:
            if cause is RemoveCause.EVICTED:
                self._ghosts.add(key)
                self._ghosts.trim(max(1, int(self._ghost_share * len(self))))
            del self._entry[key]
        else:
            self._main.pop(key, None)

    def clear(self) -> None:
        self._entry.clear()
        self._main.clear()
        self._ghosts.clear()

    def __len__(self) -> int:
        return len(self._entry) + len(self._main)

"""ARC: balances recency against frequency by the misses that its own evictions have caused.

N. Megiddo, D. S. Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003. One
difference: victims are chosen in batches, before the new keys are known, so the target is adapted
when a ghost returns, which is after the eviction that made space for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_in
from policies.eviction._queues import GhostList
from policies.options import Range

_FRESH, _SEEN = True, False


class ArcPolicy(EvictionPolicy):
    """T1 (used once) and T2 (reused) as LRU lists, with the ghosts B1 and B2. O(1) per key.

    ``capacity`` in keys limits the ghosts; without it, the limit is the largest size seen at an
    eviction.
    """

    def __init__(self, capacity: Annotated[int, Range(0)] = 0) -> None:
        self._option = capacity
        self._once: OrderedDict[Key, bool] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._once_ghosts = GhostList()
        self._again_ghosts = GhostList()
        self._capacity = capacity
        self._target = 0.0

    def insert(self, key: Key, info: EntryInfo) -> None:
        if self._once_ghosts.discard(key):
            ratio = len(self._again_ghosts) / (len(self._once_ghosts) + 1)
            self._target = min(self._target + max(1.0, ratio), float(self._capacity))
            self._again[key] = None
        elif self._again_ghosts.discard(key):
            ratio = len(self._once_ghosts) / (len(self._again_ghosts) + 1)
            self._target = max(self._target - max(1.0, ratio), 0.0)
            self._again[key] = None
        else:
            self._once[key] = _FRESH

    def touch(self, keys: Sequence[Key]) -> None:
        once, again = self._once, self._again
        for key in reversed(keys):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if once.pop(key) is _FRESH:
                    once[key] = _SEEN
                else:
                    again[key] = None

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        self._capacity = max(self._option, self._capacity, len(self))
        once = free_in(self._once, evictable)
        again = free_in(self._again, evictable)
        left = len(self._once)
        found: list[Key] = []
        while len(found) < count:
            from_once = left > 0 and left > self._target
            key = next(once if from_once else again, None)
            if key is None:
                from_once = not from_once
                key = next(once if from_once else again, None)
            if key is None:
                break
            left -= from_once
            found.append(key)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        evicted = cause is RemoveCause.EVICTED
        if self._once.pop(key, None) is not None:
            if evicted:
                self._once_ghosts.add(key)
        elif key in self._again:
            del self._again[key]
            if evicted:
                self._again_ghosts.add(key)
        if evicted:
            self._once_ghosts.trim(self._capacity - len(self._once))
            total = 2 * self._capacity - len(self) - len(self._once_ghosts)
            self._again_ghosts.trim(total)

    def clear(self) -> None:
        self.__init__(self._option)  # type: ignore[misc]  # no subclass changes the signature

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

"""GreedyDual-Size-Frequency: keeps chunks that are costly to recompute, per byte and per use.

L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy",
HP Labs TR 98-69, 1998. With the cost of recomputing a chunk at its depth in the prefix, it is
similar to PGDSF (C. Jin et al., "RAGCache: Efficient knowledge caching for retrieval-augmented
generation", arXiv 2404.12457, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count as counter
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_among
from policies.options import Range


class _Prioritized:
    __slots__ = ("priority", "uses", "value")

    def __init__(self, value: float, priority: float) -> None:
        self.value = value
        self.uses = 0
        self.priority = priority


_Item = tuple[float, int, Key, _Prioritized]


class GdsfPolicy(EvictionPolicy):
    """Priority = clock + uses x cost / size; the clock is the highest priority evicted so far.

    ``EntryInfo.cost`` is used if it is given; otherwise the cost is that of attention, which grows
    with the depth: ``1 + depth_tokens / depth_scale``. Priorities only rise, so an entry stays in
    the heap under an outdated priority and is corrected when it reaches the top: O(log n) per key,
    amortised.
    """

    def __init__(self, depth_scale: Annotated[float, Range(0, above=True)] = 32768.0) -> None:
        self._scale = depth_scale
        self._entries: dict[Key, _Prioritized] = {}
        self._heap: list[_Item] = []
        # items that had to stay in the latest search, and wait beside the heap
        self._stayed: list[_Item] = []
        self._order = counter()
        self._clock = 0.0

    def insert(self, key: Key, info: EntryInfo) -> None:
        cost = info.cost or 1.0 + info.depth_tokens / self._scale
        value = cost / max(1, info.size_bytes)
        entry = self._entries[key] = _Prioritized(value, self._clock + value)
        heappush(self._heap, (entry.priority, next(self._order), key, entry))

    def touch(self, keys: Sequence[Key]) -> None:
        entries, clock = self._entries, self._clock
        for key in keys:
            entry = entries.get(key)
            if entry is not None:
                # the first touch is by the request that inserted the key: count its use once
                entry.uses += 1
                entry.priority = clock + entry.uses * entry.value

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        self._return_free(evictable)
        found: list[Key] = []
        chosen: list[_Item] = []
        while self._heap and len(found) < count:
            item = heappop(self._heap)
            _, _, key, entry = item
            if self._entries.get(key) is not entry:
                continue
            if entry.priority > item[0]:
                heappush(self._heap, (entry.priority, next(self._order), key, entry))
                continue
            if evictable(key):
                found.append(key)
                chosen.append(item)
            else:
                self._stayed.append(item)
        for item in chosen:
            heappush(self._heap, item)
        return found

    def _return_free(self, evictable: Callable[[Key], bool]) -> None:
        """Put items back into the heap if their keys need not stay any more."""
        items = [item for item in self._stayed if self._entries.get(item[2]) is item[3]]
        free = set(free_among(evictable, [item[2] for item in items]))
        self._stayed = [item for item in items if item[2] not in free]
        for item in items:
            if item[2] in free:
                heappush(self._heap, item)

    def remove(self, key: Key, cause: RemoveCause) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if cause is RemoveCause.EVICTED:
            self._clock = max(self._clock, entry.priority)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if self._entries.get(item[2]) is item[3]]
            heapify(self._heap)

    def clear(self) -> None:
        self._entries.clear()
        self._heap.clear()
        self._stayed.clear()
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._entries)

"""LRU with expiry and holds: for operators who must limit how long content stays.

Expired keys are evicted first, even if they were used recently. Keys of a conversation that waits
for a tool call are held and evicted last. The idea of holding a conversation for a limited time
while its tool runs is from Continuum (H. Li et al., "Continuum: Efficient and robust multi-turn LLM
agent scheduling with KV cache time-to-live", arXiv 2511.02230, 2025).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import Annotated, Any

from policies import hints as names
from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take
from policies.eviction.lru import LruPolicy
from policies.options import Range

_UNKNOWN = EntryInfo()
"""Passed to LRU, which ignores it."""


class TtlPolicy(EvictionPolicy):
    """Evicts expired keys first, then the others by LRU, and held keys last.

    A key expires ``ttl_s`` seconds after its insertion. A tool call holds the keys of its request
    for ``hold_s`` seconds plus the time until the client expects to return. An operation takes O(1)
    per key, a hold O(log n).
    """

    def __init__(
        self,
        ttl_s: Annotated[float, Range(0, above=True)] = 3600.0,
        hold_s: Annotated[float, Range(0)] = 30.0,
    ) -> None:
        self._clock: Callable[[], float] = time.monotonic
        self._ttl_s = ttl_s
        self._hold_s = hold_s
        self._born: OrderedDict[Key, float] = OrderedDict()
        self._free = LruPolicy()
        self._held: OrderedDict[Key, float] = OrderedDict()
        self._ends: list[tuple[float, int, Key]] = []
        self._ticket = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._born[key] = self._clock()
        self._free.insert(key, info)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark the keys as used. A request ends the hold on its keys."""
        for key in reversed(keys):
            if key in self._held:
                self._release(key)
        self._free.touch(keys)

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        if hints.get(names.TOOL_CALL):
            self._hold(keys, self._clock() + hints.get(names.RETURN_S, 0.0) + self._hold_s)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        now = self._clock()
        self._expire_holds(now)
        found: list[Key] = []
        young_at = now - self._ttl_s
        expired = takewhile(lambda key: self._born[key] <= young_at, self._born)
        take((key for key in expired if key not in self._held), count, evictable, found)
        if len(found) < count:
            chosen = set(found)
            rest = self._free.victims(count, evictable)
            found += [key for key in rest if key not in chosen][: count - len(found)]
        take(self._held, count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._born.pop(key, None) is not None:
            self._held.pop(key, None)
            self._free.remove(key, cause)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def clear(self) -> None:
        self._born.clear()
        self._free.clear()
        self._held.clear()
        self._ends.clear()

    def __len__(self) -> int:
        return len(self._born)

    def _hold(self, keys: Sequence[Key], until: float) -> None:
        for key in reversed(keys):
            if key in self._born and self._held.get(key, 0.0) < until:
                self._free.remove(key, RemoveCause.DROPPED)
                self._held[key] = until
                self._ticket += 1
                heappush(self._ends, (until, self._ticket, key))

    def _release(self, key: Key) -> None:
        del self._held[key]
        self._free.insert(key, _UNKNOWN)

    def _expire_holds(self, now: float) -> None:
        """Move keys whose hold has ended back to LRU as its youngest keys, tail before head."""
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heappop(self._ends)
            if self._held.get(key) == until:
                self._release(key)

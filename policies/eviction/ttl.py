"""Expiry, holds and pins around LRU: for tenants that promise or forbid times.

Old keys go first whatever their use (a bound on how long content stays); keys under a hold go
last: those of a pinned prompt, and those of a conversation that waits for a tool. Holding a
conversation for a bounded time while its tool runs is the idea of Continuum (H. Li et al.,
"Continuum: Efficient and robust multi-turn LLM agent scheduling with KV cache time-to-live",
arXiv 2511.02230, 2025).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Annotated, Any

from policies import hints as names
from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import take
from policies.eviction.lru import LruPolicy
from policies.options import Range

_FOREVER = float("inf")


class TtlPolicy(EvictionPolicy):
    """LRU with expiry before it and holds behind it. O(1) per key, holds O(log n).

    ``ttl_s`` seconds after its insertion a key is the first to go. A tool call holds its
    request's keys for ``hold_s`` seconds, or for the expected return time plus that much; the
    hint ``pinned`` holds for ever. ``clock`` gives monotonic seconds; a simulator replaces it.
    """

    def __init__(
        self,
        ttl_s: Annotated[float, Range(0, above=True)] = 3600.0,
        hold_s: Annotated[float, Range(0)] = 30.0,
    ) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self._ttl_s = ttl_s
        self._hold_s = hold_s
        self._born: OrderedDict[Key, float] = OrderedDict()
        self._free = LruPolicy()
        self._held: OrderedDict[Key, float] = OrderedDict()
        self._ends: list[tuple[float, int, Key]] = []
        self._info = EntryInfo()
        self._ticket = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._born[key] = self.clock()
        if info.hints.get(names.PINNED):
            self._held[key] = _FOREVER
        else:
            self._free.insert(key, info)

    def touch(self, keys: Sequence[Key]) -> None:
        """Young again in LRU's order; a request's return ends the hold on its keys."""
        for key in reversed(keys):
            if self._held.get(key, _FOREVER) != _FOREVER:
                self._release(key)
        self._free.touch(keys)

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        if hints.get(names.PINNED):
            self._hold(keys, _FOREVER)
        elif hints.get(names.TOOL_CALL):
            self._hold(keys, self.clock() + hints.get(names.RETURN_S, 0.0) + self._hold_s)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        now = self.clock()
        self._expire_holds(now)
        found: list[Key] = []
        for key, born in self._born.items():
            if born + self._ttl_s > now or len(found) >= count:
                break
            if key not in self._held and evictable(key):
                found.append(key)
        chosen = set(found)
        rest = self._free.victims(count, lambda key: key not in chosen and evictable(key))
        found += rest[: count - len(found)]
        held = self._held.items()
        take((key for key, until in held if until != _FOREVER), count, evictable, found)
        take((key for key, until in held if until == _FOREVER), count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._born.pop(key, None) is not None:
            self._held.pop(key, None)
            self._free.remove(key, cause)

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
                if until != _FOREVER:
                    self._ticket += 1
                    heappush(self._ends, (until, self._ticket, key))

    def _release(self, key: Key) -> None:
        del self._held[key]
        self._free.insert(key, self._info)

    def _expire_holds(self, now: float) -> None:
        """Give keys whose hold is over back to LRU, as if used just now: tail before head."""
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heappop(self._ends)
            if self._held.get(key) == until:
                self._release(key)

"""LIRS: keeps the keys with the shortest distance between their last two uses.

S. Jiang, X. Zhang, "LIRS: An efficient low inter-reference recency set replacement policy to
improve buffer cache performance", SIGMETRICS 2002.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction._queues import GhostList, take
from policies.options import Range


class LirsPolicy(EvictionPolicy):
    """The recency stack S and the queue Q of members to evict first. O(1) per key, amortised.

    ``high_share`` of the capacity is for keys with a long distance (0.01 in the paper);
    ``ghost_share`` limits the ghosts in S, relative to the members.
    """

    def __init__(
        self,
        high_share: Annotated[float, Range(0, 1)] = 0.01,
        ghost_share: Annotated[float, Range(0, 10)] = 1.0,
    ) -> None:
        self._high_share = high_share
        self._ghost_share = ghost_share
        self._stack: OrderedDict[Key, None] = OrderedDict()  # S, oldest use first
        # Q; value: true if touched since it was inserted
        self._queue: OrderedDict[Key, bool] = OrderedDict()
        # members with a short distance; value: true if touched since it was inserted
        self._low: OrderedDict[Key, bool] = OrderedDict()
        self._ghosts = GhostList()
        self._low_limit = 0  # 0 until the tier is full for the first time

    def insert(self, key: Key, info: EntryInfo) -> None:
        known = self._ghosts.discard(key)
        self._stack.pop(key, None)
        self._stack[key] = None
        if known or not self._low_limit or len(self._low) < self._low_limit:
            self._low[key] = False
            self._shrink_low()
        else:
            self._queue[key] = False

    def touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self._low:
                self._to_top(key)
                self._low[key] = True
            elif key in self._queue:
                self._touch_high(key)
        self._prune()

    def _touch_high(self, key: Key) -> None:
        again = self._queue.pop(key)
        if again and key in self._stack:
            self._low[key] = True
            self._to_top(key)
            self._shrink_low()
        else:
            self._queue[key] = True
            self._to_top(key)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        self._low_limit = max(1, len(self) - max(1, int(self._high_share * len(self))))
        self._shrink_low()
        found: list[Key] = []
        take(self._queue, count, evictable, found)
        if len(found) < count:
            low = self._low
            take((key for key in self._stack if key in low), count, evictable, found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        member = self._queue.pop(key, None) is not None or self._low.pop(key, None) is not None
        if not member:
            return
        if cause is RemoveCause.EVICTED and key in self._stack:
            self._ghosts.add(key)
            if len(self._ghosts) > self._ghost_share * len(self) + 1:
                self._forget_oldest_ghost()
        else:
            self._stack.pop(key, None)
        self._prune()

    def clear(self) -> None:
        self._stack.clear()
        self._queue.clear()
        self._low.clear()
        self._ghosts.clear()
        self._low_limit = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._low)

    def _to_top(self, key: Key) -> None:
        self._stack.pop(key, None)
        self._stack[key] = None

    def _shrink_low(self) -> None:
        """Move low keys from the stack's bottom to the queue until the limit is met."""
        while self._low_limit and len(self._low) > self._low_limit:
            self._prune()
            oldest = next(iter(self._stack))
            del self._stack[oldest]
            self._queue[oldest] = self._low.pop(oldest)
        self._prune()

    def _prune(self) -> None:
        """Remove high keys and ghosts from the stack's bottom until a low key is there."""
        stack, low = self._stack, self._low
        while stack:
            oldest = next(iter(stack))
            if oldest in low:
                return
            del stack[oldest]
            self._ghosts.discard(oldest)

    def _forget_oldest_ghost(self) -> None:
        oldest = self._ghosts.oldest()
        self._ghosts.discard(oldest)
        self._stack.pop(oldest, None)

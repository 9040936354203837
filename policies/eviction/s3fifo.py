"""S3-FIFO: a small queue filters out keys that are used once, a main queue keeps the rest.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, "FIFO queues are all you need for cache eviction",
SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_in
from policies.eviction._queues import GhostList, take
from policies.options import Range

_NEW = -1  # not touched since it was inserted
_USES_MAX = 3


class S3FifoPolicy(EvictionPolicy):
    """Small and main FIFO with use counts up to 3, and ghosts. O(1) per key, amortised.

    The small queue gets ``small_share`` of the capacity (0.1 in the paper). A key moves from it to
    the main queue if it was reused at least ``moves_at`` times (2 in the paper).
    """

    def __init__(
        self,
        small_share: Annotated[float, Range(0, 1)] = 0.1,
        moves_at: Annotated[int, Range(1, _USES_MAX)] = 2,
    ) -> None:
        self._share = small_share
        self._moves_at = moves_at
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts = GhostList()

    def insert(self, key: Key, info: EntryInfo) -> None:
        if self._ghosts.discard(key):
            self._main[key] = _NEW
        else:
            self._small[key] = _NEW

    def touch(self, keys: Sequence[Key]) -> None:
        small, main = self._small, self._main
        for key in keys:
            if key in small:
                small[key] = min(small[key] + 1, _USES_MAX)
            elif key in main:
                main[key] = min(main[key] + 1, _USES_MAX)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        quota = len(self._small) - int(self._share * len(self))
        self._from_small(min(count, quota), evictable, found)
        self._from_main(count, evictable, found)
        if len(found) < count:
            chosen = set(found)
            rest = (k for k in (*self._small, *self._main) if k not in chosen)
            take(rest, count, evictable, found)
        return found

    def _from_small(self, count: int, evictable: Callable[[Key], bool], found: list[Key]) -> None:
        """Choose cold keys of the small queue. Warm keys that the search meets on its way move to
        the main queue."""
        warm: list[Key] = []
        for key in free_in(self._small, evictable):
            if len(found) >= count:
                break
            if self._small[key] >= self._moves_at:
                warm.append(key)
            else:
                found.append(key)
        for key in warm:
            del self._small[key]
            self._main[key] = 0

    def _from_main(self, count: int, evictable: Callable[[Key], bool], found: list[Key]) -> None:
        """Choose unused keys of the main queue. Each round decrements the counters of
        the used keys that it passes."""
        for _ in range(_USES_MAX + 2):
            if len(found) >= count:
                return
            chosen = set(found)
            used: list[Key] = []
            for key in free_in(self._main, evictable):
                if len(found) >= count:
                    break
                if key in chosen:
                    continue
                if self._main[key] > 0:
                    used.append(key)
                else:
                    found.append(key)
            for key in used:
                self._main[key] = self._main.pop(key) - 1
            if not used:
                return

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._small.pop(key, None) is not None:
            if cause is RemoveCause.EVICTED:
                self._ghosts.add(key)
                self._ghosts.trim(len(self))
        else:
            self._main.pop(key, None)

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

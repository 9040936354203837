"""W-TinyLFU: a new key stays only if it was requested more often than the key that it displaces.

G. Einziger, R. Friedman, B. Manes, "TinyLFU: A highly efficient cache admission policy", ACM
Transactions on Storage 13(4), 2017. A tier cannot refuse a key that was already written, so the
comparison happens when space is needed: of a key in the window and a key in main, the one with
fewer requests is the victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.eviction.slru import SlruPolicy
from policies.options import Range
from policies.sketch import FrequencySketch


class WTinyLfuPolicy(EvictionPolicy):
    """A small LRU window in front of a segmented LRU; a frequency sketch decides between them. O(1)
    per key.

    The window gets ``window_share`` of the capacity (0.01 in the paper).
    """

    def __init__(
        self,
        window_share: Annotated[float, Range(0, 1)] = 0.01,
        protected_share: Annotated[float, Range(0, 1)] = 0.8,
    ) -> None:
        self._share = window_share
        self._window: OrderedDict[Key, bool] = (
            OrderedDict()
        )  # value: true if touched since it was inserted
        self._main = SlruPolicy(protected_share)
        self._info = EntryInfo()
        self._sketch = FrequencySketch(1024)
        self._full = False

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._window[key] = False
        if not self._full and len(self._window) > self._share * len(self) + 1:
            self._promote(next(iter(self._window)))  # no comparison while everything fits
        if len(self) > self._sketch.width:
            self._sketch = FrequencySketch(4 * self._sketch.width)

    def touch(self, keys: Sequence[Key]) -> None:
        window, add = self._window, self._sketch.add
        for key in reversed(keys):
            add(key)
            if key in window:
                del window[key]
                window[key] = True
        self._main.touch(keys)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        self._full = True
        limit = int(self._share * len(self))
        surplus = [key for key in self._surplus(limit) if evictable(key)]
        rivals = self._main.victims(count, evictable)
        estimate = self._sketch.estimate
        found: list[Key] = []
        winners: list[Key] = []
        newcomer = rival = 0
        while len(found) < count and newcomer < len(surplus):
            key = surplus[newcomer]
            newcomer += 1
            if rival < len(rivals) and estimate(key) > estimate(rivals[rival]):
                found.append(rivals[rival])
                rival += 1
                self._promote(key)
                winners.append(key)
            else:
                found.append(key)
        found += rivals[rival : rival + count - len(found)]
        if len(found) < count:
            chosen = set(found)
            rest = [k for k in self._window if k not in chosen and evictable(k)]
            # keys that won a comparison are evicted last
            found += (rest + winners)[: count - len(found)]
        return found

    def _surplus(self, limit: int) -> list[Key]:
        """The window's oldest keys, as many as exceed ``limit``."""
        order = iter(self._window)
        return [next(order) for _ in range(len(self._window) - limit)]

    def _promote(self, key: Key) -> None:
        del self._window[key]
        self._main.insert(key, self._info)
        self._main.touch((key,))

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._window.pop(key, None) is None:
            self._main.remove(key, cause)

    def clear(self) -> None:
        self._window.clear()
        self._main.clear()
        self._sketch.clear()
        self._full = False

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

"""Least recently used, touched tail to head.

A request's keys are moved to the young end from its last chunk to its first, so that the head
of a prefix is always younger than its tail: eviction is deepest-first and the cache stays
prefix-closed (the leaf LRU of a radix tree, at the cost of a dict).

``OrderedDict``, here and in the other policies, because a plain dict used as a queue leaves holes
at its front that every look at the oldest key walks over again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause


class LruPolicy(EvictionPolicy):
    """An ``OrderedDict`` in order of use, oldest first. All operations are O(1) per key."""

    keeps_prefixes_closed = True

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._order[key] = None

    def insert_all(self, keys: Sequence[Key], infos: Sequence[EntryInfo]) -> None:
        order = self._order
        for key in keys:  # OrderedDict.update takes twice as long
            order[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        for key in self._order:
            if len(found) >= count:
                break
            if evictable(key):
                found.append(key)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        self._order.pop(key, None)

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

"""Leaf-first LRU: evicts the least recently used key that no other member follows in its prefix.

This is the eviction order of SGLang's radix tree (L. Zheng et al., "SGLang: Efficient execution of
structured language model programs", NeurIPS 2024), without the tree: a key's predecessor is learned
from the order in which requests touch their keys. Without pins it behaves like ``LruPolicy``. If a
tail is pinned and its head is not, only this policy stays prefix-closed, as long as other keys can
be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_in


class LeafLruPolicy(EvictionPolicy):
    """An LRU order and, per key, how many members follow it directly. O(1) per key.

    Keys are chained within their group, because a request touches several groups at once.
    """

    keeps_prefixes_closed = True

    def __init__(self) -> None:
        self._order: OrderedDict[Key, int] = OrderedDict()  # oldest first; value: the key's group
        self._before: dict[Key, Key] = {}
        self._behind: dict[Key, int] = {}

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._order[key] = info.group

    def touch(self, keys: Sequence[Key]) -> None:
        order, before = self._order, self._before
        last: dict[int, Key] = {}
        for key in keys:
            group = order.get(key)
            if group is None:
                continue
            if key not in before and group in last:
                before[key] = last[group]
                self._behind[last[group]] = self._behind.get(last[group], 0) + 1
            last[group] = key
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        """Choose leaves first. If no leaf is evictable, choose keys in LRU order, even if members
        follow them."""
        found: dict[Key, None] = {}
        gone: dict[Key, int] = {}
        behind, before = self._behind, self._before
        blocked: list[Key] = []
        for key in free_in(self._order, evictable):
            if len(found) >= count:
                break
            if behind.get(key, 0) > gone.get(key, 0):
                blocked.append(key)
                continue
            found[key] = None
            parent = before.get(key)
            if parent is not None:
                gone[parent] = gone.get(parent, 0) + 1
        for key in blocked:
            if len(found) >= count:
                break
            found.setdefault(key)
        return list(found)

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._order.pop(key, None) is None:
            return
        self._behind.pop(key, None)
        parent = self._before.pop(key, None)
        if parent in self._behind:
            self._behind[parent] -= 1
            if not self._behind[parent]:
                del self._behind[parent]

    def clear(self) -> None:
        self._order.clear()
        self._before.clear()
        self._behind.clear()

    def __len__(self) -> int:
        return len(self._order)

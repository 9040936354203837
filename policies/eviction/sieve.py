"""SIEVE: a FIFO with a hand that evicts keys which have not been used since it last passed them.

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is simpler than LRU: an efficient
turn-key eviction algorithm for web caches", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_in


class _Node:
    """One key in the ring, linked towards younger and older keys."""

    __slots__ = ("key", "older", "uses", "younger")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.uses = 0
        self.younger = self
        self.older = self


class SievePolicy(EvictionPolicy):
    """A ring with one sentinel. O(1) per key, amortised over the hand's round."""

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node] = {}
        self._root = _Node(None)  # root.younger is the oldest key, root.older the youngest
        self._hand = self._root

    def insert(self, key: Key, info: EntryInfo) -> None:
        node, root = _Node(key), self._root
        youngest = root.older
        node.older, node.younger = youngest, root
        youngest.younger = root.older = node
        self._nodes[key] = node

    def touch(self, keys: Sequence[Key]) -> None:
        nodes = self._nodes
        for key in keys:
            node = nodes.get(key)
            if node is not None:
                node.uses += 1

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        found: list[Key] = []
        chosen: set[Key] = set()
        for key in free_in(self._from_hand(), evictable):
            if len(found) >= count:
                break
            if key in chosen:
                continue
            node = self._nodes[key]
            if node.uses > 1:  # the first touch is by the request that inserted the key
                node.uses = 1
            else:
                found.append(key)
                chosen.add(key)
            self._hand = node.younger
        return found

    def _from_hand(self) -> Iterator[Key]:
        """The keys of two rounds of the hand."""
        node, root = self._hand, self._root
        for _ in range(2 * len(self._nodes) + 3):
            if node is not root:
                yield node.key
            node = node.younger

    def remove(self, key: Key, cause: RemoveCause) -> None:
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if self._hand is node:
            self._hand = node.younger
        node.older.younger = node.younger
        node.younger.older = node.older

    def clear(self) -> None:
        self._nodes.clear()
        self._root = _Node(None)
        self._hand = self._root

    def __len__(self) -> int:
        return len(self._nodes)

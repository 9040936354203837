"""Helpers shared by several policies: picking victims from ordered queues, and ghosts (keys of
evicted chunks, remembered for a while)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from policies.base import Key, free_in


def take(
    order: Iterable[Key], count: int, evictable: Callable[[Key], bool], found: list[Key]
) -> None:
    """Append keys of ``order`` for which ``evictable`` is true until ``found`` has ``count``
    keys."""
    missing = count - len(found)
    if missing > 0:
        found.extend(islice(free_in(order, evictable), missing))


class GhostList:
    """A bounded set of keys in order of entry. All operations are O(1)."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """Add a key as the youngest."""
        self._keys.pop(key, None)
        self._keys[key] = None

    def discard(self, key: Key) -> bool:
        """Remove a key; return True if it was present."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False

    def trim(self, limit: int) -> None:
        """Forget the oldest keys until at most ``limit`` are left."""
        keys = self._keys
        while len(keys) > max(0, limit):
            del keys[next(iter(keys))]

    def oldest(self) -> Key:
        """The oldest key. Raises ``StopIteration`` if there is none."""
        return next(iter(self._keys))

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

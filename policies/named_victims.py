"""Keeps evictions cheap although a policy must pass many keys that have to stay.

A policy looks for victims from the start of its order each time, so it would test thousands of keys
for each eviction of a few: half of a tier may be pinned, or wanted by waiting requests. No policy
has to know about this. The tier asks for more victims than it needs as soon as many keys were
passed, and uses up the rest in its next evictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from policies.base import EvictionPolicy, Key, free_among

PASSED_PER_VICTIM = 8
"""At most about this number of keys is passed per victim."""


class CountingTest(Protocol):
    """A test for ``EvictionPolicy.victims`` that counts the keys which must stay (``passed``)."""

    passed: int

    def __call__(self, key: Key) -> bool:
        """Return True if the key may be evicted."""


class NamedVictims:
    """The victims of one tier that its policy has named and that were not needed yet.

    The tier calls ``forget`` for keys that were used or have left it, because their place in the
    policy's order has changed. At most a sixteenth of the tier is named ahead, so the policy would
    rarely choose other victims by now.
    """

    def __init__(self) -> None:
        self._ahead: dict[Key, None] = {}
        self._passed = 0  # by the policy's latest search

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ahead)

    def choose(self, policy: EvictionPolicy, count: int, evictable: CountingTest) -> list[Key]:
        """Return 1 to ``count`` keys for which ``evictable`` is true, in the order in which to
        evict them, or none if there are none."""
        while self._ahead:
            some = list(islice(self._ahead, count))
            free = free_among(evictable, some)
            if len(free) < len(some):
                self.forget(set(some).difference(free))
            if free:
                return list(free)
        passed = min(self._passed, len(policy) // 2)
        before, wanted = evictable.passed, max(count, passed // PASSED_PER_VICTIM)
        named = policy.victims(wanted, evictable)
        self._passed = evictable.passed - before
        if len(named) > count:
            self._ahead = dict.fromkeys(named)
        return named[:count]

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove keys that were used or have left the tier."""
        if self._ahead:
            for key in keys:
                self._ahead.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._ahead.clear()
        self._passed = 0

"""Chunks of the CPU tier that wait to be written to a lower tier.

Such a chunk may be evicted like any other, but its write is then given up. Part of the planner, on
its thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence


class UnwrittenChunks:
    """The chunks that wait for any lower tier. Owned by the write-through.

    The queue of each lower tier keeps the set of that tier (``of_tier``); eviction removes chunks
    from all of them. ``given_up`` counts, by tier, the writes that were given up in this way.
    """

    def __init__(self) -> None:
        self.given_up: Counter[int] = Counter()
        self._tiers: dict[int, set[bytes]] = {}

    def of_tier(self, tier: int) -> set[bytes]:
        """The chunks that wait for one lower tier."""
        return self._tiers.setdefault(tier, set())

    def __len__(self) -> int:
        """An upper bound of the number of chunks that wait: a chunk that waits for two tiers counts
        twice."""
        return sum(map(len, self._tiers.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in waiting for waiting in self._tiers.values())

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """True if none of these keys waits."""
        return all(waiting.isdisjoint(keys) for waiting in self._tiers.values())

    def before_first(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
        """The keys before the first one that waits."""
        if self.isdisjoint(keys):
            return keys
        return keys[: next(at for at, key in enumerate(keys) if key in self)]

    def give_up(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks have left the CPU tier: they cannot be written any more."""
        gone = set(keys)
        for tier, waiting in self._tiers.items():
            before = len(waiting)
            waiting -= gone
            self.given_up[tier] += before - len(waiting)

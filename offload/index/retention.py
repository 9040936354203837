"""Which chunks of a tier may be evicted now: asked by policies, of one key or of many at once.

Chunks that must stay where they are because somebody is about to use them.

Part of the planner, on its thread. Made once per holder and given back as a whole: cheaper than a
count per chunk, and asked only for what is about to be evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable, Sequence
from itertools import filterfalse


class LoadHolds:
    """Sets of chunks, each with its owner's number."""

    def __init__(self) -> None:
        self._held: dict[int, frozenset[bytes]] = {}

    def __len__(self) -> int:
        """Owners that hold some."""
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        for keys in self._held.values():  # noqa: SIM110  # half the time of any()
            if key in keys:
                return True
        return False

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """Whether nobody holds any of these."""
        return all(held.isdisjoint(keys) for held in self._held.values())

    def hold(self, owner: int, keys: Iterable[bytes]) -> None:
        """Hold these until ``release``."""
        self._held[owner] = frozenset(keys)

    def holds(self, owner: int) -> bool:
        """Whether this owner holds some."""
        return owner in self._held

    def release(self, owner: int) -> None:
        """Let go of what this owner holds, if anything."""
        self._held.pop(owner, None)


PASSED_MAX = 64
"""From so many on that stay, a policy moves them out of its way."""


class Evictable:
    """Nothing that is in one of ``others`` (kept for clients, pinned, held for loads, protected).
    ``passed`` are keys that a policy has asked for and that must stay, in its order."""

    def __init__(self, *others: Container[bytes]) -> None:
        self.passed: list[bytes] = []
        self._others = [other for other in others if other]

    def __call__(self, key: Hashable) -> bool:
        stays = any(key in other for other in self._others)
        if stays:
            self.passed.append(key)  # type: ignore[arg-type]  # policies see Hashable
        return not stays

    def among(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
        """Those that may be evicted; at the speed of C, because a tier that is slow to write to
        keeps thousands pinned."""
        free = keys
        for names in self._others:
            if _holds_any(names, free):
                free = list(filterfalse(names.__contains__, free))
        if len(free) < len(keys):
            self.passed += filterfalse(set(free).__contains__, keys)  # type: ignore[arg-type]  # as above
        return free


def _holds_any(names: Container[bytes], keys: Sequence[Hashable]) -> bool:
    names = names.keys() if isinstance(names, dict) else names
    isdisjoint = getattr(names, "isdisjoint", None)
    if isdisjoint is not None:
        return not isdisjoint(keys)
    return any(map(names.__contains__, keys))

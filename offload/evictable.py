"""Which chunks of a tier may be evicted now: asked by policies, of one key or of many at once."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from itertools import filterfalse

PASSED_MOST = 64
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

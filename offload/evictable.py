"""Which chunks of a tier may be evicted now: asked by policies, of one key or of many at once."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from itertools import filterfalse

PASSED_MOST = 64


class Evictable:
    """Not what is ``kept`` for a time, and nothing that is in one of ``others`` (pinned, held for
    loads, protected). ``passed`` are kept keys that a policy has asked for."""

    def __init__(self, kept: Container[bytes], *others: Container[bytes]) -> None:
        self.passed: list[bytes] = []
        self._kept = kept
        self._others = [other for other in others if other]

    def __call__(self, key: Hashable) -> bool:
        if key in self._kept:
            self.passed.append(key)  # type: ignore[arg-type]  # policies see Hashable
            return False
        return not any(key in other for other in self._others)

    def among(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
        """Those that may be evicted; at the speed of C, because a tier that is slow to write to
        keeps thousands pinned."""
        if self._kept and _holds_any(self._kept, keys):
            self.passed += filter(self._kept.__contains__, keys)  # type: ignore[arg-type]  # as above
            keys = list(filterfalse(self._kept.__contains__, keys))
        for names in self._others:
            if _holds_any(names, keys):
                keys = list(filterfalse(names.__contains__, keys))
        return keys


def _holds_any(names: Container[bytes], keys: Sequence[Hashable]) -> bool:
    names = names.keys() if isinstance(names, dict) else names
    isdisjoint = getattr(names, "isdisjoint", None)
    if isdisjoint is not None:
        return not isdisjoint(keys)
    return any(map(names.__contains__, keys))

"""The longest prefix of a request that a tier holds, by bisection where that is right.

Where eviction keeps prefixes closed (``EvictionPolicy.keeps_prefixes_closed``) membership along a
prefix is a run of yes followed by a run of no, so about log2(n) probes find its end: 10 instead of
800. Whether a tier is closed is a property of all that enters and leaves it, not of its policy
alone: a pinned tail, a failed store or a lost record can leave a hole. A wrong answer here is a hit
that a load then finds missing, which costs a recomputation and never a token. The debug check
finds the hole at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

K = TypeVar("K")


class PrefixHoleError(AssertionError):
    """A tier that promised closed prefixes holds a key behind one that it does not hold."""


def longest_prefix(
    keys: Sequence[K], present: Callable[[K], bool], closed: bool, *, debug: bool = False
) -> int:
    """How many keys from the first on are present.

    ``closed`` is the promise that no present key follows an absent one; with ``debug`` it is
    checked by a scan of all keys, which raises ``PrefixHoleError``.
    """
    if not closed:
        return next((i for i, key in enumerate(keys) if not present(key)), len(keys))
    if debug:
        hole = find_hole(keys, present)
        if hole is not None:
            raise PrefixHoleError(
                f"key {hole[1]} of {len(keys)} is present and key {hole[0]} before it is not: "
                f"{keys[hole[1]]!r} behind {keys[hole[0]]!r}"
            )
    if not keys or not present(keys[0]):
        return 0
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high) // 2
        if present(keys[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def find_hole(keys: Sequence[K], present: Callable[[K], bool]) -> tuple[int, int] | None:
    """The first absent key and the first present one behind it; None if there is no hole."""
    absent = -1
    for place, key in enumerate(keys):
        if present(key):
            if absent >= 0:
                return absent, place
        elif absent < 0:
            absent = place
    return None

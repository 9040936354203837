"""What several policies need to pick victims from ordered queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from policies.base import Key


def take(
    order: Iterable[Key], count: int, evictable: Callable[[Key], bool], found: list[Key]
) -> None:
    """Append keys of ``order`` for which ``evictable`` holds until ``found`` has ``count``."""
    missing = count - len(found)
    if missing > 0:
        found.extend(islice(filter(evictable, order), missing))

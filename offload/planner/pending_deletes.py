"""Deletions that wait to be sent to the lower tiers. Part of the planner, on the same thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from offload.messages.plan import Keys

DELETIONS_MAX = 1024
"""Of one tier in one step: a tier that has lost everything has millions of them."""


class PendingDeletes:
    """Keys by tier, oldest first. A key that waits here must not be written again before."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[bytes]] = {}

    def add(self, tier: int, keys: Iterable[bytes]) -> None:
        """Records of a tier that its index does not know (any more)."""
        self._waiting.setdefault(tier, deque()).extend(keys)

    def waiting(self, tier: int) -> int:
        """How many wait for a tier."""
        return len(self._waiting.get(tier, ()))

    def is_behind(self, tier: int) -> bool:
        """Whether one step is not enough for what waits: nothing may be written meanwhile."""
        return self.waiting(tier) > DELETIONS_MAX

    def take(self, tiers: Iterable[int]) -> Mapping[int, Keys]:
        """What is sent in this step to those of ``tiers`` for which something waits."""
        taken = {}
        for tier in tiers:
            waiting = self._waiting.pop(tier, None)
            if waiting is None:
                continue
            if len(waiting) <= 2 * DELETIONS_MAX:  # with what this step has evicted
                taken[tier] = Keys(tuple(waiting))
            else:
                taken[tier] = Keys([waiting.popleft() for _ in range(DELETIONS_MAX)])
                self._waiting[tier] = waiting
        return taken

    def clear(self) -> None:
        """A reset forgets everything anyway."""
        self._waiting.clear()

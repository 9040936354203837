"""Records that wait to be deleted from the lower tiers. This module is pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping

from offload.messages.plan import Keys
from offload.planner.step_budget import DELETIONS_MAX


class PendingDeletes:
    """The keys that wait to be deleted. A key must not be written again while it waits here.

    Owned by the planner; used on its thread. ``waiting`` has the keys by tier, oldest first, and no
    tier without keys. ``shared`` are the tiers that other engines write to as well.
    """

    def __init__(self, shared: Container[int] = ()) -> None:
        self._shared = shared
        self.waiting: dict[int, deque[bytes]] = {}

    def add(
        self, tier: int, keys: Iterable[bytes], damaged: Container[bytes] = frozenset()
    ) -> None:
        """Queue the deletion of records that the tier's index does not know.

        In a shared tier only ``damaged`` records are deleted, because a later write would not
        replace them. Other engines may still use the other records.
        """
        if tier in self._shared:
            keys = [key for key in keys if key in damaged]
        keys = list(keys)
        if keys:
            self.waiting.setdefault(tier, deque()).extend(keys)

    def is_behind(self, tier: int) -> bool:
        """True if a tier has more deletions than one step sends. Nothing may be written to the tier
        as long as this is true."""
        return len(self.waiting.get(tier, ())) > DELETIONS_MAX

    def take(self, tiers: Iterable[int]) -> Mapping[int, Keys]:
        """Remove and return the deletions that this step sends to ``tiers``, by tier. Tiers without
        deletions are left out."""
        taken = {}
        for tier in tiers:
            waiting = self.waiting.pop(tier, None)
            if not waiting:
                continue
            if len(waiting) <= 2 * DELETIONS_MAX:  # includes keys that this step has evicted
                taken[tier] = Keys(tuple(waiting))
            else:
                taken[tier] = Keys([waiting.popleft() for _ in range(DELETIONS_MAX)])
                self.waiting[tier] = waiting
        return taken

    def clear(self) -> None:
        """Forget everything, because a reset deletes all records anyway."""
        self.waiting.clear()

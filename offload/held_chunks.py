"""Chunks that must stay where they are because somebody is about to use them.

Part of the planner, on its thread. Made once per holder and given back as a whole: cheaper than a
count per chunk, and asked only for what is about to be evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable


class HeldChunks:
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

"""Protects the chunks of a running request from eviction by the request's own stores."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

FULL_STEPS = 16
"""A request that could only evict its own chunks tries again after this number of steps, or when a
chunk has entered any tier: it would be too slow to examine all of them in every step."""


class OwnChunks:
    """The chunks of one running request, which its own stores must not evict.

    A prompt that is longer than the CPU tier must not evict its own head to store its tail, because
    chunks after a gap can never be hit. ``keys`` has the chunks that are stored or being stored.
    Those that one of ``saved`` (the lower tiers) holds may be evicted. The set of keys is built
    only when a store has to evict; most stores find free slots.
    """

    __slots__ = ("_added", "_full_at", "_full_step", "_keys", "_saved")

    def __init__(self, saved: tuple[Mapping[bytes, int], ...]) -> None:
        self._keys: set[bytes] = set()
        self._added: list[Sequence[bytes]] = []  # not in the set yet
        self._saved = saved
        self._full_at = -1
        self._full_step = 0

    @property
    def keys(self) -> set[bytes]:
        """The keys of all protected chunks."""
        if self._added:
            self._keys.update(*self._added)
            self._added.clear()
        return self._keys

    def __bool__(self) -> bool:
        return bool(self._added or self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys and not any(key in saved for saved in self._saved)

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """True if all these chunks may be evicted."""
        if self.keys.isdisjoint(keys):
            return True
        mine = self.keys.intersection(keys)
        for saved in self._saved:
            mine.difference_update(saved.keys() & mine)
        return not mine

    def add(self, keys: Sequence[bytes]) -> None:
        """Protect these chunks from now on. The caller must not change ``keys`` afterwards."""
        if keys:
            self._added.append(keys)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Stop protecting these chunks: they lie after a gap."""
        self._keys.update(*self._added)
        self._added.clear()
        self._keys.difference_update(keys)

    def clear(self) -> None:
        """Stop protecting all chunks: the request starts again."""
        self._keys.clear()
        self._added.clear()

    def found_full(self, entered: int, step: int) -> None:
        """Record that a store of this step found no other chunk to evict, after ``entered`` chunks
        had entered the tiers."""
        self._full_at, self._full_step = entered, step

    def is_full(self, entered: int, step: int) -> bool:
        """True if a store need not look for victims again yet."""
        return entered == self._full_at and step < self._full_step + FULL_STEPS

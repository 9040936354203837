"""Resets of a shared tier: afterwards no earlier record is found, and no unfinished write is
stored.

Owned by the event loop's thread.
"""

from __future__ import annotations


class Resets:
    """Counts resets in ``begun``. Between the start of a reset and its success (or the success of a
    later one) the tier stores and finds nothing. A failed reset keeps the tier in that state."""

    def __init__(self) -> None:
        self.begun = self._done = 0

    def begin(self) -> int:
        """Begin a reset and return its number."""
        self.begun += 1
        return self.begun

    def end(self, number: int) -> None:
        """Record that the reset with this number has succeeded."""
        self._done = max(self._done, number)

    @property
    def is_open(self) -> bool:
        """True while a reset has begun and has not succeeded."""
        return self._done < self.begun

"""Resets of a tier that others share: nothing of before is found, nothing half begun is stored.

Owned by the event loop's thread.
"""

from __future__ import annotations


class Resets:
    """``begun`` counts them. From the first moment of a reset until one that was begun then or
    later is done, also when it fails, the tier stores and finds nothing."""

    def __init__(self) -> None:
        self.begun = self._done = 0

    def begin(self) -> int:
        """One begins; its number."""
        self.begun += 1
        return self.begun

    def end(self, number: int) -> None:
        """That one is done."""
        self._done = max(self._done, number)

    @property
    def is_open(self) -> bool:
        """Whether one has begun and is not done."""
        return self._done < self.begun

"""Places for chunks: numbered slots of a slab, or bytes of a lower tier.

A place is an int. Both kinds answer the same three questions, so one index serves every tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection


class Space(ABC):
    """What a tier has to give away. ``used`` never exceeds ``capacity``."""

    capacity: int
    used: int

    @abstractmethod
    def take(self, size: int) -> int | None:
        """A place for ``size`` bytes, or ``None`` if there is no room."""

    def take_bytes(self, size: int) -> bool:
        """Take many places whose sizes add up to this, where a place *is* its size; ``False``
        with nothing taken if that is not so here, or there is no room."""
        return False

    @abstractmethod
    def give(self, place: int) -> None:
        """Take a place back."""

    def give_all(self, places: Collection[int]) -> None:
        """Take many places back."""
        for place in places:
            self.give(place)

    @abstractmethod
    def missing(self, size: int) -> int:
        """How much ``used`` has to fall so that ``size`` bytes fit; 0 if they fit now."""

    @abstractmethod
    def amount(self, place: int) -> int:
        """What giving this place back takes off ``used``."""


class SlotSpace(Space):
    """``count`` equal slots from ``first`` on; the last one freed is used first (it is warm)."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.capacity = count
        self.used = 0
        self._free = list(range(first + count - 1, first - 1, -1))

    def take(self, size: int) -> int | None:
        if not self._free:
            return None
        self.used += 1
        return self._free.pop()

    def give(self, place: int) -> None:
        self.used -= 1
        self._free.append(place)

    def missing(self, size: int) -> int:
        return 0 if self._free else 1

    def amount(self, place: int) -> int:
        return 1


class ByteSpace(Space):
    """A budget of bytes; a place is the number of bytes taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, size: int) -> int | None:
        if self.used + size > self.capacity:
            return None
        self.used += size
        return size

    def take_bytes(self, size: int) -> bool:
        return self.take(size) is not None

    def give(self, place: int) -> None:
        self.used -= place

    def give_all(self, places: Collection[int]) -> None:
        self.used -= sum(places)

    def missing(self, size: int) -> int:
        return max(0, self.used + size - self.capacity)

    def amount(self, place: int) -> int:
        return place

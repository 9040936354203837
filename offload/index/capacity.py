"""Places for chunks: numbered slots of a slab, or bytes of a lower tier.

A place is an int. Both kinds answer the same three questions, so one index serves every tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Reservation(NamedTuple):
    """A granted prefix of the keys asked for: ``places[i]`` is the location of the i-th key.

    ``evicted`` are the keys that left the tier to make space.
    """

    places: tuple[int, ...]
    evicted: tuple[bytes, ...]


class Capacity(ABC):
    """What a tier has to give away. ``used`` never exceeds ``capacity``."""

    capacity: int
    used: int

    @abstractmethod
    def take(self, size: int) -> int | None:
        """A place for ``size`` bytes, or ``None`` if there is no room."""

    def take_all(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """A place for each of many, or ``None`` with nothing taken if there is no room for all."""
        places = self.take_some(sizes)
        if len(places) < len(sizes):
            self.give_all(places)
            return None
        return places

    def take_some(self, sizes: Sequence[int]) -> Sequence[int]:
        """A place for each of the first ones, as long as there is room."""
        places: list[int] = []
        for size in sizes:
            place = self.take(size)
            if place is None:
                break
            places.append(place)
        return places

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

    def missing_all(self, sizes: Sequence[int]) -> int:
        """``missing`` for all of these together."""
        return self.missing(sum(sizes))

    @abstractmethod
    def amount(self, place: int) -> int:
        """What giving this place back takes off ``used``."""


class SlotCapacity(Capacity):
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

    def take_all(self, sizes: Sequence[int]) -> Sequence[int] | None:
        count = len(sizes)
        if count > len(self._free):
            return None
        self.used += count
        places = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return places

    def give(self, place: int) -> None:
        self.used -= 1
        self._free.append(place)

    def give_all(self, places: Collection[int]) -> None:
        self.used -= len(places)
        self._free += places

    def missing(self, size: int) -> int:
        return 0 if self._free else 1

    def missing_all(self, sizes: Sequence[int]) -> int:
        return max(0, len(sizes) - len(self._free))

    def amount(self, place: int) -> int:
        return 1


class ByteCapacity(Capacity):
    """A budget of bytes; a place is the number of bytes taken."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, size: int) -> int | None:
        if self.used + size > self.capacity:
            return None
        self.used += size
        return size

    def take_all(self, sizes: Sequence[int]) -> Sequence[int] | None:
        return sizes if self.take_bytes(sum(sizes)) else None

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

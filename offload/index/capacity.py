"""The capacity of a tier: numbered slots of a slab, or bytes of a lower tier.

A location is an int: the number of the slot, or the number of bytes taken. Both kinds have the same
methods, so that one index serves every tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Reservation(NamedTuple):
    """The granted keys, a prefix of the requested ones: ``locations[i]`` is the location of the
    i-th key.

    ``evicted`` contains the keys that left the tier to make space.
    """

    locations: tuple[int, ...]
    evicted: tuple[bytes, ...]


class Capacity(ABC):
    """The space of a tier. ``used`` never exceeds ``capacity``."""

    capacity: int
    used: int

    @abstractmethod
    def take(self, size: int) -> int | None:
        """A location for ``size`` bytes, or ``None`` if there is no space."""

    def take_all(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """A location for each of these sizes; ``None``, with nothing taken, if they do not all
        fit."""
        locations = self.take_some(sizes)
        if len(locations) < len(sizes):
            self.give_all(locations)
            return None
        return locations

    def take_some(self, sizes: Sequence[int]) -> Sequence[int]:
        """Locations for the first of these sizes, as long as there is space."""
        locations: list[int] = []
        for size in sizes:
            location = self.take(size)
            if location is None:
                break
            locations.append(location)
        return locations

    def take_bytes(self, size: int) -> bool:
        """Take many locations at once in a space whose locations are sizes; ``size`` is their sum.
        Returns ``False`` and takes nothing if they do not fit, or if the space has slots."""
        return False

    @abstractmethod
    def give(self, location: int) -> None:
        """Return a location."""

    def give_all(self, locations: Collection[int]) -> None:
        """Return many locations."""
        for location in locations:
            self.give(location)

    @abstractmethod
    def missing(self, size: int) -> int:
        """The bytes by which ``used`` must fall so that ``size`` bytes fit; 0 if they fit now."""

    def missing_all(self, sizes: Sequence[int]) -> int:
        """Like ``missing``, for all of these sizes together."""
        return self.missing(sum(sizes))

    @abstractmethod
    def amount(self, location: int) -> int:
        """The amount by which ``used`` falls when this location is returned."""


class SlotCapacity(Capacity):
    """``count`` equal slots from ``first`` on; the slot freed last is used first (it is warm). Only
    the first ``usable`` slots are given out, until ``grow`` adds more."""

    def __init__(self, count: int, first: int = 0, usable: int | None = None) -> None:
        self.capacity = count
        self.used = 0
        self._first = first
        self._usable = 0
        self._free: list[int] = []
        self.grow(count if usable is None else usable)

    def grow(self, usable: int) -> None:
        """Give out the first ``usable`` slots from now on; a lower number than before has no
        effect."""
        usable = min(usable, self.capacity)
        if usable > self._usable:
            added = range(self._first + usable - 1, self._first + self._usable - 1, -1)
            self._free[:0] = added  # used last, because slots that were freed are warm
            self._usable = usable

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
        locations = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return locations

    def give(self, location: int) -> None:
        self.used -= 1
        self._free.append(location)

    def give_all(self, locations: Collection[int]) -> None:
        self.used -= len(locations)
        self._free += locations

    def missing(self, size: int) -> int:
        return 0 if self._free else 1

    def missing_all(self, sizes: Sequence[int]) -> int:
        return max(0, len(sizes) - len(self._free))

    def amount(self, location: int) -> int:
        return 1


class UsableSlots:
    """Gives out slots of the CPU tier once every rank can use them. A rank pins its slots in the
    background, from the first to the last."""

    def __init__(self, space: SlotCapacity, by_rank: Mapping[int, int]) -> None:
        self._space = space
        self._by_rank = dict(by_rank)

    def take_in(self, reported: Mapping[int, int]) -> None:
        """Record that some ranks can use more slots than before."""
        if reported:
            self._by_rank |= reported
            self._space.grow(min(self._by_rank.values()))


class ByteCapacity(Capacity):
    """A budget of bytes; a location is the number of bytes taken."""

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

    def give(self, location: int) -> None:
        self.used -= location

    def give_all(self, locations: Collection[int]) -> None:
        self.used -= sum(locations)

    def missing(self, size: int) -> int:
        return max(0, self.used + size - self.capacity)

    def amount(self, location: int) -> int:
        return location

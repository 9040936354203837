"""The allocations of the payload file: the extents that each record owns, and who uses them.

    free --allocate--> held --adopt--> present --hold--> held --free--> free
                       held --free--> free               (never named by a transaction)
                                       present --free_present--> free

An allocation that a read is using when it is freed is parked and becomes free with the last
``release``. ``hold`` is called when a record leaves the index in memory, ``free`` when the
transaction that deletes it is durable: in between the allocation must not be written.

The event loop's thread owns this; it knows nothing about keys.
"""

from __future__ import annotations

from tiers.io.extents import Extent, ExtentMap, Extents, clip, gaps

_HEADER = Extent(0, 1)


class Allocations:
    """The state of every allocation; an allocation is identified by its first page. See the
    module's docstring."""

    def __init__(self, file_pages: int, free: list[Extent]) -> None:
        self._map = ExtentMap(file_pages, free)
        self._held: dict[int, Extents] = {}
        self._leases: dict[int, tuple[int, Extents]] = {}
        self._parked: dict[int, Extents] = {}

    @property
    def pages(self) -> int:
        """The length of the file in pages, including page 0."""
        return self._map.pages

    @property
    def used_pages(self) -> int:
        """The pages that are not free, without page 0."""
        return self._map.pages - 1 - self._map.free_pages

    @property
    def is_waiting(self) -> bool:
        """True if allocations will become free when the reads in progress end."""
        return bool(self._parked)

    def extend(self, pages: int) -> None:
        """Record that the file has grown by this many pages."""
        self._map.extend(pages)

    def allocate(self, pages: int) -> Extents | None:
        """Hold free pages; ``None`` if too few are free."""
        extents = self._map.allocate(pages)
        if extents is not None:
            self._held[extents[0].start] = extents
        return extents

    def adopt(self, extents: Extents, pages: int) -> None:
        """Give the first ``pages`` pages of this held allocation to a present record."""
        del self._held[extents[0].start]
        _, rest = clip(extents, pages)
        self._map.release(rest)

    def hold(self, extents: Extents) -> None:
        """Hold the allocation of a record that was removed from memory, but is still on disk."""
        self._held[extents[0].start] = extents

    def free(self, extents: Extents) -> None:
        """Free this held allocation: no durable transaction refers to it any more."""
        start = extents[0].start
        if start in self._leases:
            self._parked[start] = extents
        else:
            del self._held[start]
            self._map.release(extents)

    def free_present(self) -> None:
        """Free the allocations of all present records: no durable transaction refers to them. Those
        that are held stay held."""
        for start, (_count, extents) in self._leases.items():
            if start not in self._held:
                self._held[start] = self._parked[start] = extents
        used = [extent for extents in self._held.values() for extent in extents]
        self._map = ExtentMap(self._map.pages, gaps(self._map.pages, [_HEADER, *used]))

    def lease(self, extents: Extents) -> None:
        """Record that a read of this allocation begins."""
        count, _ = self._leases.get(extents[0].start, (0, extents))
        self._leases[extents[0].start] = (count + 1, extents)

    def release(self, extents: Extents) -> None:
        """Record that a read of this allocation has ended."""
        start = extents[0].start
        count, _ = self._leases[start]
        if count > 1:
            self._leases[start] = (count - 1, extents)
            return
        del self._leases[start]
        parked = self._parked.pop(start, None)
        if parked is not None:
            self.free(parked)

    def check(self, present: list[Extents]) -> None:
        """Raise ``AssertionError`` unless present, held and free extents tile the file."""
        owned = [extent for extents in [*present, *self._held.values()] for extent in extents]
        free = self._map.free_extents()
        expected = gaps(self._map.pages, [_HEADER, *owned])
        assert free == expected, f"free {free}, but {expected} have no owner"
        assert set(self._parked) <= set(self._held) & set(self._leases), (
            "parked allocations are held"
        )

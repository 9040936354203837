"""Who owns each place of the payload file: nobody, a present record, or something on its way.

    free --allocate--> held --adopt--> present --forget--> held --freed--> free
                       held --freed--> free               (never named by a transaction)

A place that a read is using when it is ``freed`` is parked and becomes free with the last
``unpin``. ``forget`` comes when a record leaves the index in memory, ``freed`` when the
transaction that says so is durable: in between the place may not be written.

Owned by the event loop's thread; knows nothing of keys.
"""

from __future__ import annotations

from tiers.io.extents import Extent, ExtentMap, Extents, clip, gaps

_HEADER = Extent(0, 1)


class Allocations:
    """See the module. A place is known by its first page."""

    def __init__(self, file_pages: int, free: list[Extent]) -> None:
        self._map = ExtentMap(file_pages, free)
        self._held: dict[int, Extents] = {}
        self._pins: dict[int, tuple[int, Extents]] = {}
        self._parked: dict[int, Extents] = {}

    @property
    def pages(self) -> int:
        """Length of the file, page 0 included."""
        return self._map.pages

    @property
    def used_pages(self) -> int:
        """Pages that are not free, page 0 excluded."""
        return self._map.pages - 1 - self._map.free_pages

    @property
    def is_waiting(self) -> bool:
        """Whether places will become free without anybody's doing."""
        return bool(self._parked)

    def extend(self, pages: int) -> None:
        """The file has grown by this many pages."""
        self._map.extend(pages)

    def allocate(self, pages: int) -> Extents | None:
        """Hold a free place; ``None`` if there is none."""
        extents = self._map.allocate(pages)
        if extents is not None:
            self._held[extents[0].start] = extents
        return extents

    def adopt(self, extents: Extents, pages: int) -> None:
        """A present record owns the first ``pages`` pages of this held place now."""
        del self._held[extents[0].start]
        _, rest = clip(extents, pages)
        self._map.release(rest)

    def forget(self, extents: Extents) -> None:
        """The record of this place is gone from memory, but not yet from the disk."""
        self._held[extents[0].start] = extents

    def freed(self, extents: Extents) -> None:
        """No durable transaction names this held place any more."""
        start = extents[0].start
        if start in self._pins:
            self._parked[start] = extents
        else:
            del self._held[start]
            self._map.release(extents)

    def cleared(self) -> None:
        """No durable transaction names any place, except those held for writes to come."""
        for start, (_count, extents) in self._pins.items():
            if start not in self._held:
                self._held[start] = self._parked[start] = extents
        used = [extent for extents in self._held.values() for extent in extents]
        self._map = ExtentMap(self._map.pages, gaps(self._map.pages, [_HEADER, *used]))

    def pin(self, extents: Extents) -> None:
        """A read begins in this place."""
        count, _ = self._pins.get(extents[0].start, (0, extents))
        self._pins[extents[0].start] = (count + 1, extents)

    def unpin(self, extents: Extents) -> None:
        """A read in this place has ended."""
        start = extents[0].start
        count, _ = self._pins[start]
        if count > 1:
            self._pins[start] = (count - 1, extents)
            return
        del self._pins[start]
        parked = self._parked.pop(start, None)
        if parked is not None:
            self.freed(parked)

    def check(self, present: list[Extents]) -> None:
        """Raise ``AssertionError`` unless present, held and free places tile the file."""
        owned = [extent for extents in [*present, *self._held.values()] for extent in extents]
        free = self._map.free_extents()
        expected = gaps(self._map.pages, [_HEADER, *owned])
        assert free == expected, f"free {free}, but nobody owns {expected}"
        assert set(self._parked) <= set(self._held) & set(self._pins), "parked places are held"

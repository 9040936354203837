"""Free space of the payload file, in pages of ``ALIGNMENT`` bytes.

Allocation is next fit: each search starts where the last allocation ended, and wraps around at the
end. Records written together lie together, and eviction by age frees them together, so the file
behaves like a circular log without ever moving a byte. The whole map is searched only if no free
extent near the cursor is long enough, and only then is a record split into several extents.

One thread owns this module's objects, which know nothing about files or keys.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PROBES = 32
"""Number of free extents from the cursor on that are tried before the whole map is searched."""
EXTENTS_PER_RECORD_MAX = 64


class Extent(NamedTuple):
    """The pages ``[start, start + pages)``."""

    start: int
    pages: int


Extents = tuple[Extent, ...]


def clip(extents: Extents, pages: int) -> tuple[Extents, Extents]:
    """Split the extents of one record into the first ``pages`` pages and the rest."""
    if len(extents) == 1 and extents[0].pages == pages:
        return extents, ()
    kept, rest = [], []
    for start, length in extents:
        part = min(length, pages)
        pages -= part
        if part:
            kept.append(Extent(start, part))
        if part < length:
            rest.append(Extent(start + part, length - part))
    return tuple(kept), tuple(rest)


def gaps(pages: int, used: Iterable[Extent]) -> list[Extent]:
    """Return the free extents in ``[0, pages)``, given the disjoint ``used`` extents in any
    order."""
    found = []
    end = 0
    for start, length in sorted(used):
        if start < end or start + length > pages:
            raise ValueError(f"pages [{start}, {start + length}) overlap others or lie outside")
        if start > end:
            found.append(Extent(end, start - end))
        end = start + length
    if end < pages:
        found.append(Extent(end, pages - end))
    return found


class ExtentMap:
    """The free pages among ``pages`` pages."""

    def __init__(self, pages: int, free: Iterable[Extent]) -> None:
        """``free`` are extents inside ``[0, pages)``, in order, no two adjacent; see ``gaps``."""
        self.pages = pages
        self.free_pages = 0
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._cursor = 0
        for start, length in free:
            self._starts.append(start)
            self._length[start] = length
            self._start_of_end[start + length] = start
            self.free_pages += length

    def extend(self, pages: int) -> None:
        """Append ``pages`` free pages to the map."""
        start, self.pages = self.pages, self.pages + pages
        self.release((Extent(start, pages),))

    def allocate(self, pages: int) -> Extents | None:
        """Take ``pages`` pages, as one extent if possible. Returns ``None`` if too few are free."""
        if pages > self.free_pages:
            return None
        start = self._probe(pages)
        if start is None:
            start = next((s for s in self._starts if self._length[s] >= pages), None)
        if start is not None:
            return (self._take(start, pages),)
        return self._gather(pages)

    def _probe(self, pages: int) -> int | None:
        starts, count = self._starts, len(self._starts)
        first = bisect_left(starts, self._cursor)
        for step in range(min(PROBES, count)):
            start = starts[(first + step) % count]
            if self._length[start] >= pages:
                return start
        return None

    def _gather(self, pages: int) -> Extents | None:
        """Combine the longest free extents. Returns ``None`` if they do not suffice."""
        longest = heapq.nlargest(EXTENTS_PER_RECORD_MAX, self._starts, key=self._length.__getitem__)
        if sum(self._length[start] for start in longest) < pages:
            return None
        extents = []
        for start in longest:
            part = min(pages, self._length[start])
            extents.append(self._take(start, part))
            pages -= part
            if not pages:
                break
        return tuple(extents)

    def _take(self, start: int, pages: int) -> Extent:
        """Cut ``pages`` pages off the front of the free extent at ``start``."""
        index = bisect_left(self._starts, start)
        length = self._length.pop(start)
        if length == pages:
            del self._starts[index]
            del self._start_of_end[start + length]
        else:
            self._starts[index] = start + pages
            self._length[start + pages] = length - pages
            self._start_of_end[start + length] = start + pages
        self.free_pages -= pages
        self._cursor = start + pages
        return Extent(start, pages)

    def release(self, extents: Sequence[Extent]) -> None:
        """Return extents and merge them with their free neighbours."""
        for start, pages in extents:
            self.free_pages += pages
            end = start + pages
            if end in self._length:  # a free extent begins where this one ends
                pages += self._remove(end)
            before = self._start_of_end.get(start)
            if before is not None:
                pages += self._remove(before)
                start = before
            insort(self._starts, start)
            self._length[start] = pages
            self._start_of_end[start + pages] = start

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start_of_end[start + length]
        del self._starts[bisect_left(self._starts, start)]
        return length

    def free_extents(self) -> list[Extent]:
        """Return the free extents in order; no two are adjacent."""
        return [Extent(start, self._length[start]) for start in self._starts]

    def __repr__(self) -> str:
        return f"<ExtentMap {self.free_pages} of {self.pages} pages free in {len(self._starts)}>"

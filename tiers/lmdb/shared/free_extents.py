"""Free space of a payload file that several processes share: extents in a table of LMDB.

    free    first page (8 bytes, big-endian) -> number of pages (8 bytes, big-endian)

No two extents are adjacent. As in ``io.extents``, each allocation starts where the previous one
ended, regardless of the process: records written together lie together, and eviction by age frees
them together.

Every function here runs inside a transaction of the caller.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from tiers.io.extents import EXTENTS_PER_RECORD_MAX, PROBES, Extent, Extents

LOOKED_AT_MAX = 4096
"""Free extents considered for an allocation of several extents."""


class FreeExtents:
    """The free extents in one transaction. ``cursor`` is where the last allocation ended, ``pages``
    the number of free pages; the caller stores both."""

    def __init__(self, txn: Any, database: Any, cursor: int, pages: int) -> None:
        self._txn = txn
        self._database = database
        self.cursor = cursor
        self.pages = pages

    def take(self, pages: int) -> Extents | None:
        """Take ``pages`` pages, as one extent if one of that size is near the cursor. Returns
        ``None`` if too few pages are free."""
        if pages > self.pages:
            return None
        for start, length in self._from_cursor(PROBES):
            if length >= pages:
                return (self._cut(start, length, pages),)
        return self._gather(pages)

    def _from_cursor(self, count: int) -> list[tuple[int, int]]:
        """Iterate over at most ``count`` extents from the cursor on, wrapping around at the end."""
        found: list[tuple[int, int]] = []
        with self._txn.cursor(db=self._database) as extents:
            if extents.set_range(_number(self.cursor)):
                for start, length in extents.iternext():
                    found.append((_value(start), _value(length)))
                    if len(found) == count:
                        return found
            if extents.first():
                for start, length in extents.iternext():
                    if _value(start) >= self.cursor or len(found) == count:
                        break
                    found.append((_value(start), _value(length)))
        return found

    def _gather(self, pages: int) -> Extents | None:
        """Combine the longest extents. Returns ``None`` if they do not suffice."""
        seen = self._from_cursor(LOOKED_AT_MAX)
        longest = heapq.nlargest(EXTENTS_PER_RECORD_MAX, seen, key=lambda extent: extent[1])
        if sum(length for _start, length in longest) < pages:
            return None
        extents = []
        for start, length in longest:
            part = min(pages, length)
            extents.append(self._cut(start, length, part))
            pages -= part
            if not pages:
                break
        return tuple(extents)

    def _cut(self, start: int, length: int, pages: int) -> Extent:
        # Put before delete: LMDB releases the page of a table that becomes empty only at the
        # commit, so a transaction that empties the table once per record would use up the whole
        # map.
        if length > pages:
            self._txn.put(_number(start + pages), _number(length - pages), db=self._database)
        self._txn.delete(_number(start), db=self._database)
        self.pages -= pages
        self.cursor = start + pages
        return Extent(start, pages)

    def give(self, extents: Iterable[Extent]) -> None:
        """Return extents and merge them with their free neighbours."""
        for start, pages in extents:
            self.pages += pages
            end, after = start + pages, -1
            with self._txn.cursor(db=self._database) as near:
                there = near.set_range(_number(start))
                if there:
                    after, length = _value(near.key()), _value(near.value())
                    if after < end:
                        raise ValueError(f"pages [{start}, {end}) are free already")
                    if after == end:
                        end += length
                if near.prev() if there else near.last():
                    before, length = _value(near.key()), _value(near.value())
                    if before + length > start:
                        raise ValueError(f"pages [{start}, {end}) are free already")
                    if before + length == start:
                        start = before
            self._txn.put(_number(start), _number(end - start), db=self._database)
            if start < after < end:  # last, otherwise the table might be empty for a moment
                self._txn.delete(_number(after), db=self._database)


def free_extents(txn: Any, database: Any) -> list[Extent]:
    """Return all free extents in order."""
    with txn.cursor(db=database) as extents:
        return [Extent(_value(start), _value(length)) for start, length in extents.iternext()]


def put_free_extents(txn: Any, database: Any, extents: Iterable[Extent]) -> int:
    """Store these extents, which are sorted and not adjacent, as the free ones. Returns their
    number of pages."""
    txn.drop(database, delete=False)
    pages = 0
    for start, length in extents:
        txn.put(_number(start), _number(length), db=database, append=True)
        pages += length
    return pages


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _value(raw: bytes) -> int:
    return int.from_bytes(raw, "big")

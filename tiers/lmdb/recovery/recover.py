"""Recovery at open: decides which records of an index a tier can trust.

Records are read as tables and checked as arrays, a few thousand rows at a time, which fit into the
processor's cache. A record is dropped unless its header is of this format, identity and epoch, and
its pages lie inside the payload file and belong to no other record. Payloads are not read here;
every read verifies their tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT, Key
from tiers.io.extents import Extent
from tiers.lmdb.records.record_map import RecordMap
from tiers.lmdb.records.record_table import RecordTable
from tiers.record import COMPRESSED, ENCRYPTED, MAGIC, VERSION, Identity

ROWS_AT_ONCE = 1 << 12
_PAGES_BITS = 24
"""Bits for the pages of an extent (less than 64 GiB). 40 bits are left for its start (4 PiB)."""
_Mask = npt.NDArray[np.bool_]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The good ``records``, the ``free`` extents, the ``bad`` keys, which must be deleted, and the
    next time of use. ``without_key`` counts the bad records that only the encryption key makes
    bad."""

    records: RecordMap
    free: list[Extent]
    bad: list[Key]
    next_use: int
    without_key: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The properties that a good record must have. ``file_pages`` is the length of the payload
    file; page 0 is its own header and belongs to no record. ``key_ids`` are the available
    encryption keys: with keys, only records encrypted with one of them are good; without, only
    unencrypted records are."""

    identity: Identity
    epoch: int
    file_pages: int
    key_ids: frozenset[bytes] = frozenset()


def recover(found: Iterable[RecordTable], expected: Expected) -> Recovered:
    """Sort the records of a scan into good and bad. No key may occur twice. Takes ownership of the
    tables."""
    bad: list[Key] = []
    tables: list[RecordTable] = []
    for table in found:
        if table.is_whole:
            tables.append(table)
        else:
            bad += table.keys()
    good, starts, ends, last_use, without_key = _check(tables, expected)
    if (starts[1:] < ends[:-1]).any():
        _drop_members(tables, good)
        starts, ends = _extents_of(tables, good)
    for table, mask in zip(tables, good, strict=True):
        if not mask.all():
            bad += table.keys(~mask)
    free = _free_extents(starts, ends, expected.file_pages)
    return Recovered(RecordMap(tables, good), free, bad, last_use + 1, without_key)


def _parts(table: RecordTable) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """All rows of a table, part by part."""
    fields = table.fields()
    for start in range(0, table.count, ROWS_AT_ONCE):
        part = slice(start, min(table.count, start + ROWS_AT_ONCE))
        yield part, fields[part]


def _check(
    tables: Sequence[RecordTable], expected: Expected
) -> tuple[list[_Mask], _Rows, _Rows, int, int]:
    """Determine which records are good on their own, ignoring overlaps, their extents (starts and
    ends), the latest time of use, and how many records would be good with another encryption
    key."""
    good = [np.empty(table.count, np.bool_) for table in tables]
    extents = _ExtentList(sum(table.count * table.extent_count for table in tables))
    last_use = without_key = 0
    for table, mask in zip(tables, good, strict=True):
        for part, fields in _parts(table):
            fits, has_key = _fits(fields, expected), _has_key(fields, expected.key_ids)
            without_key += int(np.count_nonzero(fits & ~has_key))
            fits &= has_key
            mask[part] = fits
            chosen = fields if fits.all() else fields[fits]
            extents.add(chosen["extents"])
            last_use = max(last_use, int(chosen["use"].astype(np.int64).max(initial=0)))
    return good, *extents.sorted(), last_use, without_key


def _extents_of(tables: Sequence[RecordTable], good: Sequence[_Mask]) -> tuple[_Rows, _Rows]:
    """Return the extents of good records."""
    extents = _ExtentList(sum(table.count * table.extent_count for table in tables))
    for table, mask in zip(tables, good, strict=True):
        for part, fields in _parts(table):
            extents.add(fields["extents"][mask[part]])
    return extents.sorted()


class _ExtentList:
    """Extents as one number each: the start, and the length in the low bits."""

    def __init__(self, extents_max: int) -> None:
        self._extents = np.empty(extents_max, np.uint64)
        self._count = 0

    def add(self, extents: npt.NDArray[Any]) -> None:
        part = self._extents[self._count : self._count + extents.size].reshape(extents.shape)
        np.left_shift(extents["start"], np.uint64(_PAGES_BITS), out=part)
        part |= extents["pages"]
        self._count += extents.size

    def sorted(self) -> tuple[_Rows, _Rows]:
        """Starts and ends, sorted by start."""
        extents = self._extents[: self._count]
        extents.sort()
        starts = (extents >> np.uint64(_PAGES_BITS)).view(np.int64)
        extents &= np.uint64((1 << _PAGES_BITS) - 1)
        ends = extents.view(np.int64)
        ends += starts
        return starts, ends


def _drop_members(tables: Sequence[RecordTable], good: Sequence[_Mask]) -> None:
    """Remove records that share a page from ``good``: at least one of them is wrong, but there is
    no way to tell which."""
    starts, ends, owners = list[_Rows](), list[_Rows](), list[_Rows]()
    for table, mask, first in zip(tables, good, _firsts(tables), strict=True):
        extents = table.fields()["extents"][mask]
        starts.append(extents["start"].astype(np.int64).ravel())
        ends.append(starts[-1] + extents["pages"].ravel())
        owners.append(np.repeat(first + np.flatnonzero(mask), table.extent_count))
    order = np.argsort(np.concatenate(starts), kind="stable")
    start, owner = np.concatenate(starts)[order], np.concatenate(owners)[order]
    reach = np.maximum.accumulate(np.concatenate(ends)[order])
    behind = np.flatnonzero(start[1:] < reach[:-1]) + 1
    before = np.searchsorted(reach, start[behind], side="right")
    shared = np.unique(owner[np.concatenate((behind, before))])
    for mask, first in zip(good, _firsts(tables), strict=True):
        mask[shared[(shared >= first) & (shared < first + mask.size)] - first] = False


def _firsts(tables: Sequence[RecordTable]) -> list[int]:
    """The number of each table's first row when the rows of all tables are numbered
    consecutively."""
    return list(accumulate((table.count for table in tables[:-1]), initial=0))[: len(tables)]


def _has_key(fields: npt.NDArray[Any], key_ids: frozenset[bytes]) -> _Mask:
    """Return which records are encrypted with one of these keys, or without keys, which are not
    encrypted."""
    has_key: _Mask = (fields["flags"] & ENCRYPTED != 0) == bool(key_ids)
    if key_ids:
        known = [int.from_bytes(key_id, "little") for key_id in key_ids]
        has_key &= np.isin(fields["key_id"], known)
    return has_key


def _fits(fields: npt.NDArray[Any], expected: Expected) -> _Mask:
    """Return which records are of this format, identity and epoch, with pages inside the file.
    Ignores encryption."""
    one, two = np.frombuffer(expected.identity.namespace, "<u8").tolist()
    good: _Mask = fields["magic"] == int.from_bytes(MAGIC, "little")
    good &= fields["version"] == VERSION
    good &= fields["rank"] == expected.identity.rank
    good &= fields["namespace"][:, 0] == one
    good &= fields["namespace"][:, 1] == two
    good &= fields["epoch"] == expected.epoch
    extents = fields["extents"]
    total = np.zeros(fields.size, np.uint64)
    for number in range(extents.shape[1]):  # by columns: row by row, this takes ten times as long
        starts, pages = extents["start"][:, number], extents["pages"][:, number].astype(np.uint64)
        good &= (pages > 0) & (pages < 1 << _PAGES_BITS)
        good &= (starts >= 1) & (starts < expected.file_pages)
        good &= starts + pages <= expected.file_pages
        total += pages
    stored, payload = fields["stored_bytes"], fields["payload_bytes"]
    good &= np.where(fields["flags"] & COMPRESSED, stored < payload, stored == payload)
    # Compared as signed numbers, so that a length near 2**64 does not match by overflowing.
    good &= total.view(np.int64) == -(-fields["stored_bytes"].astype(np.int64) // ALIGNMENT)
    return good


def _free_extents(starts: _Rows, ends: _Rows, file_pages: int) -> list[Extent]:
    """Return the parts of the file that are not covered by the extents, which are sorted and
    disjoint."""
    stop = max(file_pages, 1)
    if not starts.size:
        return [Extent(1, stop - 1)] if stop > 1 else []
    wide = np.flatnonzero(starts[1:] > ends[:-1])
    begins = [1, *ends[wide].tolist(), int(ends[-1])]
    stops = [int(starts[0]), *starts[wide + 1].tolist(), stop]
    return [Extent(a, b - a) for a, b in zip(begins, stops, strict=True) if b > a]

"""From what an index holds at open to what a tier may believe.

Records come as tables and are checked as arrays, some thousand rows at a time: those stay in the
processor's cache meanwhile. A record is dropped unless its header is of this format, identity and
epoch, and its pages lie inside the payload file and belong to nobody else. Payloads are not read
here; their tags are verified by every read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT, Key
from tiers.extents import Run
from tiers.record import ENCRYPTED, MAGIC, VERSION, Identity
from tiers.record_table import RecordTable
from tiers.records import Records

ROWS_AT_ONCE = 1 << 13
_Mask = npt.NDArray[np.bool_]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The good ``records``; ``free`` runs of pages; ``bad`` keys to delete; next ``use``."""

    records: Records
    free: list[Run]
    bad: list[Key]
    next_use: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What a good record says of itself. ``file_pages`` is the length of the payload file; page 0
    is its own header and belongs to no record. ``key_ids`` are the encryption keys at hand:
    with any, only records encrypted by one of them are good; with none, only plain ones."""

    identity: Identity
    epoch: int
    file_pages: int
    key_ids: frozenset[bytes] = frozenset()


class _Places(NamedTuple):
    """Runs of pages and whose they are: the row of a record is its number among all."""

    starts: _Rows
    ends: _Rows
    rows: _Rows

    def take(self, chosen: Any) -> _Places:
        return _Places(*(column[chosen] for column in self))


def recover(found: Iterable[RecordTable], expected: Expected) -> Recovered:
    """Sort what a scan finds into good and bad. No key may come twice. Takes the tables over."""
    bad: list[Key] = []
    tables: list[RecordTable] = []
    good: list[_Mask] = []
    places: list[_Places] = []
    last_use = count = 0
    for table in found:
        if not table.is_whole:
            bad += table.keys()
            continue
        fields = table.fields()
        tables.append(table)
        for start in range(0, table.count, ROWS_AT_ONCE):
            part = fields[start : start + ROWS_AT_ONCE]
            fits = _fits(part, expected)
            rows = count + np.arange(part.size)
            if not fits.all():
                part, rows = part[fits], rows[fits]
            last_use = max(last_use, int(part["use"].astype(np.int64).max(initial=0)))
            good.append(fits)
            places.append(_places_of(part["runs"], rows))
            count += fits.size
        del fields
    is_good = np.concatenate(good) if good else np.zeros(0, np.bool_)
    starts, ends = _disjoint(_all_of(places), is_good)
    bounds = accumulate((table.count for table in tables), initial=0)
    masks = [is_good[start:stop] for start, stop in pairwise(bounds)]
    for table, mask in zip(tables, masks, strict=True):
        if not mask.all():
            bad += table.keys(~mask)
    free = _free_runs(starts, ends, expected.file_pages)
    return Recovered(Records(tables, masks), free, bad, last_use + 1)


def _disjoint(places: _Places, is_good: _Mask) -> tuple[_Rows, _Rows]:
    """Where the places of the good records start and where they end, both rising, after those that
    share pages were taken from ``is_good``.

    Sorting starts and ends apart is several times faster than keeping them together, and tells:
    runs are disjoint if and only if each ends before the next begins, whichever those are.
    """
    starts, ends = np.sort(places.starts), np.sort(places.ends)
    if (starts[1:] < ends[:-1]).any():
        shared = _rows_that_overlap(places)
        is_good[shared] = False
        alone = places.take(~np.isin(places.rows, shared))
        starts, ends = np.sort(alone.starts), np.sort(alone.ends)
    return starts, ends


def _fits(fields: npt.NDArray[Any], expected: Expected) -> _Mask:
    """Which records are of this format, identity and epoch, with pages inside the file."""
    runs = fields["runs"]
    pages = runs["pages"].astype(np.uint64)
    good: _Mask = (
        (fields["magic"] == int.from_bytes(MAGIC, "little"))
        & (fields["version"] == VERSION)
        & (fields["rank"] == expected.identity.rank)
        & (fields["namespace"] == np.frombuffer(expected.identity.namespace, "<u8")).all(1)
        & (fields["epoch"] == expected.epoch)
        & (pages.sum(1) == -(-fields["stored_bytes"].astype(np.int64) // ALIGNMENT))
        & ((pages > 0) & (runs["start"] >= 1) & (runs["start"] < expected.file_pages)).all(1)
    )
    good &= (runs["start"] + pages <= expected.file_pages).all(1)
    good &= (fields["flags"] & ENCRYPTED != 0) == bool(expected.key_ids)
    if expected.key_ids:
        known = [int.from_bytes(key_id, "little") for key_id in expected.key_ids]
        good &= np.isin(fields["key_id"], known)
    return good


def _places_of(runs: npt.NDArray[Any], rows: _Rows) -> _Places:
    starts = runs["start"].astype(np.int64)
    ends = starts + runs["pages"]
    return _Places(starts.ravel(), ends.ravel(), np.repeat(rows, runs.shape[1]))


def _all_of(parts: list[_Places]) -> _Places:
    if not parts:
        return _Places(*(np.zeros(0, np.int64),) * 3)
    return _Places(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _rows_that_overlap(every_place: _Places) -> _Rows:
    """Two records over one page: at least one is wrong, and which one cannot be told, so both
    go."""
    places = every_place.take(np.argsort(every_place.starts, kind="stable"))
    reach = np.maximum.accumulate(places.ends)
    behind = np.flatnonzero(places.starts[1:] < reach[:-1]) + 1
    owners = np.searchsorted(reach, places.starts[behind], side="right")
    return np.unique(places.rows[np.concatenate((behind, owners))])


def _free_runs(starts: _Rows, ends: _Rows, file_pages: int) -> list[Run]:
    """What disjoint runs leave of the file, given sorted."""
    begins = np.concatenate(([1], ends))
    stops = np.concatenate((starts, [max(file_pages, 1)]))
    wide = stops > begins
    return [
        Run(start, stop - start)
        for start, stop in zip(begins[wide].tolist(), stops[wide].tolist(), strict=True)
    ]

"""From what an index holds at open to what a tier may believe.

Records come as tables and are checked as arrays, some thousand rows at a time: those stay in the
processor's cache meanwhile. A record is dropped unless its header is of this format, identity and
epoch, and its pages lie inside the payload file and belong to nobody else. Payloads are not read
here; their tags are verified by every read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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


def recover(found: Iterable[RecordTable], expected: Expected) -> Recovered:
    """Sort what a scan finds into good and bad. No key may come twice. Takes the tables over."""
    bad: list[Key] = []
    tables: list[RecordTable] = []
    for table in found:
        if table.is_whole:
            tables.append(table)
        else:
            bad += table.keys()
    checked = [_check(table, expected) for table in tables]
    good = [mask for mask, _ in checked]
    last_use = max((use for _, use in checked), default=0)
    starts, ends = _places(tables, good)
    if (starts[1:] < ends[:-1]).any():
        _drop_sharers(tables, good)
        starts, ends = _places(tables, good)
    for table, mask in zip(tables, good, strict=True):
        if not mask.all():
            bad += table.keys(~mask)
    free = _free_runs(starts, ends, expected.file_pages)
    return Recovered(Records(tables, good), free, bad, last_use + 1)


def _parts(table: RecordTable) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """All rows of a table, some at a time."""
    fields = table.fields()
    for start in range(0, table.count, ROWS_AT_ONCE):
        part = slice(start, min(table.count, start + ROWS_AT_ONCE))
        yield part, fields[part]


def _check(table: RecordTable, expected: Expected) -> tuple[_Mask, int]:
    """Which records are good in themselves, and the last use of one of them."""
    good = np.empty(table.count, np.bool_)
    last_use = 0
    for part, fields in _parts(table):
        good[part] = fits = _fits(fields, expected)
        uses = fields["use"].astype(np.int64)[fits]
        last_use = max(last_use, int(uses.max(initial=0)))
    return good, last_use


def _places(tables: Sequence[RecordTable], good: Sequence[_Mask]) -> tuple[_Rows, _Rows]:
    """Where the runs of good records start and where they end, both rising.

    Sorting starts and ends apart is several times faster than keeping them together, and tells:
    runs are disjoint if and only if each ends before the next begins, whichever those are.
    """
    count = sum(
        np.count_nonzero(mask) * table.run_count for table, mask in zip(tables, good, strict=True)
    )
    starts, ends = np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    for table, mask in zip(tables, good, strict=True):
        for part, fields in _parts(table):
            runs = fields["runs"][mask[part]].ravel()
            chosen = slice(at, at + runs.size)
            starts[chosen] = runs["start"]
            ends[chosen] = starts[chosen] + runs["pages"]
            at += runs.size
    starts.sort()
    ends.sort()
    return starts, ends


def _drop_sharers(tables: Sequence[RecordTable], good: Sequence[_Mask]) -> None:
    """Two records over one page: at least one is wrong, and which one cannot be told, so both go
    from ``good``."""
    starts, ends, owners = list[_Rows](), list[_Rows](), list[_Rows]()
    for table, mask, first in zip(tables, good, _firsts(tables), strict=True):
        runs = table.fields()["runs"][mask]
        starts.append(runs["start"].astype(np.int64).ravel())
        ends.append(starts[-1] + runs["pages"].ravel())
        owners.append(np.repeat(first + np.flatnonzero(mask), table.run_count))
    order = np.argsort(np.concatenate(starts), kind="stable")
    start, owner = np.concatenate(starts)[order], np.concatenate(owners)[order]
    reach = np.maximum.accumulate(np.concatenate(ends)[order])
    behind = np.flatnonzero(start[1:] < reach[:-1]) + 1
    before = np.searchsorted(reach, start[behind], side="right")
    shared = np.unique(owner[np.concatenate((behind, before))])
    for mask, first in zip(good, _firsts(tables), strict=True):
        mask[shared[(shared >= first) & (shared < first + mask.size)] - first] = False


def _firsts(tables: Sequence[RecordTable]) -> list[int]:
    """The number of each table's first row among all."""
    return list(accumulate((table.count for table in tables[:-1]), initial=0))[: len(tables)]


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


def _free_runs(starts: _Rows, ends: _Rows, file_pages: int) -> list[Run]:
    """What disjoint runs leave of the file, given sorted."""
    stop = max(file_pages, 1)
    if not starts.size:
        return [Run(1, stop - 1)] if stop > 1 else []
    wide = np.flatnonzero(starts[1:] > ends[:-1])
    begins = [1, *ends[wide].tolist(), int(ends[-1])]
    stops = [int(starts[0]), *starts[wide + 1].tolist(), stop]
    return [Run(a, b - a) for a, b in zip(begins, stops, strict=True) if b > a]

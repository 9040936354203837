"""From what an index holds at open to what a tier may believe.

Records come as tables of thousands and are checked as arrays. A record is dropped unless its header
is of this format, identity and epoch, and its pages lie inside the payload file and belong to
nobody else. Payloads are not read here; their tags are verified by every read.

Only the keys become objects, at the end and in the order of use: whoever goes through them
afterwards (the tier's ``keys``, the scheduler's index) walks through memory from front to back,
which is several times faster than a walk in the order of hashes. Values stay rows of their tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT, Key
from tiers.extents import Run
from tiers.record import ENCRYPTED, MAGIC, VERSION, Identity
from tiers.record_table import RecordTable

KEYS_AT_ONCE = 1 << 14
_Mask = npt.NDArray[np.bool_]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """``rows``: where each good record is in ``tables``, counted through all of them, the least
    recently used first; ``uses`` and ``payload_bytes``, one per row; ``free`` runs of pages;
    ``bad`` keys to delete; next ``use``."""

    rows: dict[Key, int]
    tables: list[RecordTable]
    uses: _Rows
    payload_bytes: _Rows
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
    """Runs of pages and whose they are: the row of a record is its number among the kept."""

    starts: _Rows
    ends: _Rows
    rows: _Rows

    def take(self, chosen: Any) -> _Places:
        return _Places(*(column[chosen] for column in self))


def recover(found: Iterable[RecordTable], expected: Expected) -> Recovered:
    """Sort what a scan finds into good and bad. No key may come twice."""
    bad: list[Key] = []
    tables: list[RecordTable] = []
    good: list[_Mask] = []
    uses: list[_Rows] = []
    sizes: list[_Rows] = []
    places: list[_Places] = []
    count = 0
    for table in found:
        if not table.is_whole:
            bad += table.keys()
            continue
        fields = table.fields()
        fits = _fits(fields, expected)
        places.append(_places_of(fields["runs"][fits], count + np.flatnonzero(fits)))
        tables.append(table)
        good.append(fits)
        uses.append(fields["use"].astype(np.int64))
        sizes.append(fields["payload_bytes"].astype(np.int64))
        count += fits.size
    every_place = _all_of(places)
    is_good, all_uses = _joined(good, np.bool_), _joined(uses, np.int64)
    # Sorting starts and ends apart is several times faster than keeping them together, and tells:
    # runs are disjoint if and only if each ends before the next begins, whichever those are.
    starts, ends = np.sort(every_place.starts), np.sort(every_place.ends)
    if (starts[1:] < ends[:-1]).any():
        shared = _rows_that_overlap(every_place)
        is_good[shared] = False
        alone = every_place.take(~np.isin(every_place.rows, shared))
        starts, ends = np.sort(alone.starts), np.sort(alone.ends)
    start = 0
    for table in tables:
        dropped = ~is_good[start : start + table.rows.size]
        start += table.rows.size
        if dropped.any():
            bad += table.take(dropped).keys()
    rows = _in_order_of_use(tables, all_uses, is_good)
    free = _free_runs(starts, ends, expected.file_pages)
    next_use = int(all_uses[is_good].max(initial=0)) + 1
    return Recovered(rows, tables, all_uses, _joined(sizes, np.int64), free, bad, next_use)


def _joined(parts: list[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _in_order_of_use(tables: list[RecordTable], uses: _Rows, is_good: _Mask) -> dict[Key, int]:
    """The good rows under their keys, the least recently used first."""
    order = np.argsort(uses)
    if not is_good.all():
        order = order[is_good[order]]
    keys: list[Key] = []
    if len({table.key_bytes for table in tables}) == 1:
        columns = np.concatenate([table.key_column() for table in tables])
        for start in range(0, order.size, KEYS_AT_ONCE):
            keys += columns[order[start : start + KEYS_AT_ONCE]].tolist()
    else:
        every = [key for table in tables for key in table.keys()]  # noqa: SIM118  # no dict
        keys = [every[row] for row in order.tolist()]
    return dict(zip(keys, order.tolist(), strict=True))


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

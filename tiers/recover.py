"""From what an index holds at open to what a tier may believe.

Records come in batches of a few thousand and are checked as arrays, one batch at a time: memory
that is used again and stays in the processor's cache is what makes a million records take about a
second (arrays over all of them take three times as long, most of it for fresh pages).
A record is dropped unless its header is of this format, identity and epoch, and its pages lie
inside the payload file and belong to nobody else. Payloads are not read here; their tags are
verified by every read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.base import ALIGNMENT, Key
from tiers.extents import Run
from tiers.lmdb_index import RUN_BYTES, RUNS_AT
from tiers.record import ENCRYPTED, MAGIC, VERSION, Identity

_VALUE = np.dtype(
    [
        ("use", ">u8"),
        ("magic", "<u4"),
        ("version", "u1"),
        ("flags", "u1"),
        ("rank", "<u2"),
        ("group", "<u4"),
        ("key_bytes", "<u2"),
        ("zero", "<u2"),
        ("epoch", "<u8"),
        ("payload_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("namespace", "<u8", 2),
        ("nonce", "u1", 12),
        ("key_id", "<u4"),
        ("tag", "u1", 16),
    ]
)
_RUN = np.dtype([("start", "<u8"), ("pages", "<u4")])
assert (_VALUE.itemsize, _RUN.itemsize) == (RUNS_AT, RUN_BYTES), "layout of lmdb_index"
_Mask = npt.NDArray[np.bool_]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """``records`` in any order; ``free`` runs of pages; ``bad`` keys to delete; next ``use``."""

    records: dict[Key, bytes]
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


def recover(batches: Iterable[dict[Key, bytes]], expected: Expected) -> Recovered:
    """Sort what a scan finds into good and bad. No key may come twice."""
    records: dict[Key, bytes] = {}
    bad: list[Key] = []
    parts: list[_Places] = []
    last_use = 0
    for batch in batches:
        good, found, use = _check_batch(list(batch.values()), expected, len(records))
        if not good.all():
            dropped = list(itertools.compress(batch, (~good).tolist()))
            bad += dropped
            for key in dropped:
                del batch[key]
        records.update(batch)
        parts += found
        last_use = max(last_use, use)
    places = _sorted(parts)
    shared = _rows_that_overlap(places)
    if shared.size:
        keys = list(records)
        for row in shared.tolist():
            bad.append(keys[row])
            del records[keys[row]]
        places = places.take(~np.isin(places.rows, shared))
    return Recovered(records, _free_runs(places, expected.file_pages), bad, last_use + 1)


def _check_batch(
    values: list[bytes], expected: Expected, first_row: int
) -> tuple[_Mask, list[_Places], int]:
    """Which values are good, the places of those, and their latest use."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    whole = (lengths > RUNS_AT) & ((lengths - RUNS_AT) % RUN_BYTES == 0)
    tables = []
    good = np.zeros(len(values), np.bool_)
    for length in np.unique(lengths[whole]).tolist():
        positions = np.flatnonzero(lengths == length)
        mine = values
        if positions.size < len(values):
            mine = [values[position] for position in positions.tolist()]
        count = (length - RUNS_AT) // RUN_BYTES
        layout = np.dtype([("fields", _VALUE), ("runs", _RUN, (count,))])
        table = np.frombuffer(b"".join(mine), layout)
        good[positions] = fits = _fits(table["fields"], table["runs"], expected)
        tables.append((positions[fits], table[fits]))
    rows = first_row + np.cumsum(good) - 1
    places = [_places_of(table["runs"], rows[positions]) for positions, table in tables]
    last_use = max((int(t["fields"]["use"].max(initial=0)) for _, t in tables), default=0)
    return good, places, last_use


def _fits(fields: npt.NDArray[Any], runs: npt.NDArray[Any], expected: Expected) -> _Mask:
    """Which records are of this format, identity and epoch, with pages inside the file."""
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


def _sorted(parts: list[_Places]) -> _Places:
    """All places, by start."""
    if not parts:
        return _Places(*(np.zeros(0, np.int64),) * 3)
    places = _Places(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return places.take(np.argsort(places.starts, kind="stable"))


def _rows_that_overlap(places: _Places) -> _Rows:
    """Two records over one page: at least one is wrong, and which one cannot be told, so both
    go."""
    reach = np.maximum.accumulate(places.ends) if places.ends.size else places.ends
    behind = np.flatnonzero(places.starts[1:] < reach[:-1]) + 1
    owners = np.searchsorted(reach, places.starts[behind], side="right")
    return np.unique(places.rows[np.concatenate((behind, owners))])


def _free_runs(places: _Places, file_pages: int) -> list[Run]:
    begins = np.concatenate(([1], places.ends))
    stops = np.concatenate((places.starts, [max(file_pages, 1)]))
    wide = stops > begins
    return [
        Run(start, stop - start)
        for start, stop in zip(begins[wide].tolist(), stops[wide].tolist(), strict=True)
    ]

"""From what an index holds at open to what a tier may believe.

A million records take well under a second: the values are checked as arrays, not one by one.
A record is dropped unless its header is of this format, identity and epoch, and its pages lie
inside the payload file and belong to nobody else. Payloads are not read here; their tags are
verified by every read.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, slots=True)
class Recovered:
    """``records`` in any order; ``free`` runs of pages; ``bad`` keys to delete; next ``use``."""

    records: dict[Key, bytes]
    free: list[Run]
    bad: list[Key]
    next_use: int


class _Places(NamedTuple):
    """Runs by start: begin, end, number of their class, row in it."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Class:
    """All values with the same number of runs: positions in the scan, fields, places."""

    positions: npt.NDArray[np.int64]
    fields: npt.NDArray[Any]
    runs: npt.NDArray[Any]
    good: _Mask


def recover(
    found: dict[Key, bytes],
    identity: Identity,
    epoch: int,
    file_pages: int,
    key_ids: frozenset[bytes] = frozenset(),
) -> Recovered:
    """Sort what a scan found into good and bad. ``file_pages`` is the length of the payload
    file; page 0 is its own header and belongs to no record. ``key_ids`` are the encryption keys
    at hand: with any, only records encrypted by one of them are good; with none, only plain."""
    values = list(found.values())
    classes = [
        _check_class(values, positions, identity, epoch, file_pages, key_ids)
        for positions in _by_length(values)
    ]
    places = _sorted_runs(classes)
    if _drop_overlaps(classes, places):
        places = _sorted_runs(classes)
    good = np.zeros(len(values), np.bool_)
    last_use = 0
    for part in classes:
        good[part.positions] = part.good
        last_use = max(last_use, int(part.fields["use"][part.good].max(initial=0)))
    bad = list(itertools.compress(found, (~good).tolist()))
    for key in bad:
        del found[key]
    return Recovered(found, _free_runs(places, file_pages), bad, last_use + 1)


def _by_length(values: list[bytes]) -> list[npt.NDArray[np.int64]]:
    """Positions of values that are a header and whole runs, one array per length."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    whole = (lengths > RUNS_AT) & ((lengths - RUNS_AT) % RUN_BYTES == 0)
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths[whole])]


def _check_class(
    values: list[bytes],
    positions: npt.NDArray[np.int64],
    identity: Identity,
    epoch: int,
    file_pages: int,
    key_ids: frozenset[bytes],
) -> _Class:
    mine = values
    if positions.size < len(values):
        mine = [values[position] for position in positions.tolist()]
    count = (len(mine[0]) - RUNS_AT) // RUN_BYTES
    layout = np.dtype([("fields", _VALUE), ("runs", _RUN, (count,))])
    table = np.frombuffer(b"".join(mine), layout)
    fields, runs = table["fields"], table["runs"]
    pages = runs["pages"].astype(np.uint64)
    good = (
        (fields["magic"] == int.from_bytes(MAGIC, "little"))
        & (fields["version"] == VERSION)
        & (fields["rank"] == identity.rank)
        & (fields["namespace"] == np.frombuffer(identity.namespace, "<u8")).all(1)
        & (fields["epoch"] == epoch)
        & (pages.sum(1) == -(-fields["stored_bytes"].astype(np.int64) // ALIGNMENT))
        & ((pages > 0) & (runs["start"] >= 1) & (runs["start"] < file_pages)).all(1)
    )
    good &= (runs["start"] + pages <= file_pages).all(1)
    good &= (fields["flags"] & ENCRYPTED != 0) == bool(key_ids)
    if key_ids:
        good &= np.isin(fields["key_id"], [int.from_bytes(i, "little") for i in key_ids])
    return _Class(positions, fields, runs, good)


def _sorted_runs(classes: list[_Class]) -> _Places:
    """The runs of all good records, by start."""
    starts, ends, numbers, rows = [], [], [], []
    for number, part in enumerate(classes):
        runs = part.runs[part.good]
        start = runs["start"].astype(np.int64)
        starts.append(start.ravel())
        ends.append((start + runs["pages"]).ravel())
        numbers.append(np.full(start.size, number))
        rows.append(np.repeat(np.flatnonzero(part.good), part.runs.shape[1]))
    if not classes:
        return _Places(*(np.zeros(0, np.int64),) * 4)
    order = np.argsort(np.concatenate(starts), kind="stable")
    return _Places(*(np.concatenate(parts)[order] for parts in (starts, ends, numbers, rows)))


def _drop_overlaps(classes: list[_Class], places: _Places) -> bool:
    """Two records over one page: at least one is wrong, and which one cannot be told, so both
    go. Whether there were any."""
    reach = np.maximum.accumulate(places.ends) if places.ends.size else places.ends
    behind = np.flatnonzero(places.starts[1:] < reach[:-1]) + 1
    owners = np.searchsorted(reach, places.starts[behind], side="right")
    for at in [*behind.tolist(), *owners.tolist()]:
        classes[places.numbers[at]].good[places.rows[at]] = False
    return bool(behind.size)


def _free_runs(places: _Places, file_pages: int) -> list[Run]:
    begins = np.concatenate(([1], places.ends))
    stops = np.concatenate((places.starts, [max(file_pages, 1)]))
    wide = stops > begins
    return [
        Run(start, stop - start)
        for start, stop in zip(begins[wide].tolist(), stops[wide].tolist(), strict=True)
    ]

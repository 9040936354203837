"""Records as arrays: the keys and values of an index, thousands at a time.

A value is the time of last use, the record's header and its runs of pages (``lmdb_index``), so
records with keys of one length and as many runs are rows of one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.base import Key
from tiers.record import HEADER_BYTES

USE_BYTES = 8
RUNS_AT = USE_BYTES + HEADER_BYTES
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
RUN_BYTES = _RUN.itemsize
assert _VALUE.itemsize == RUNS_AT, "the layout of a header"


@dataclass(frozen=True, slots=True)
class RecordTable:
    """``rows``: one void of fixed length per record, its key and then its value."""

    key_bytes: int
    rows: npt.NDArray[np.void]

    @property
    def shape(self) -> tuple[int, int]:
        """Lengths of key and value."""
        return self.key_bytes, self.rows.itemsize - self.key_bytes

    def key_column(self) -> npt.NDArray[np.void]:
        """One void per row."""
        key, value = self.shape
        return self.rows.view([("key", f"V{key}"), ("value", f"V{value}")])["key"]

    def keys(self) -> list[Key]:
        """The keys, in the order of rows."""
        return self.key_column().tolist()  # type: ignore[no-any-return]  # a void's item is bytes

    def value(self, row: int) -> bytes:
        """The value of one row."""
        return bytes(self.rows[row])[self.key_bytes :]

    def items(self) -> Iterator[tuple[Key, bytes]]:
        """Keys with their values."""
        return zip(self.keys(), map(self.value, range(self.rows.size)), strict=True)

    def take(self, chosen: Any) -> RecordTable:
        """These rows."""
        return RecordTable(self.key_bytes, self.rows[chosen])

    @property
    def is_whole(self) -> bool:
        """Whether values have the length of a header and at least one run."""
        runs_bytes = self.shape[1] - RUNS_AT
        return runs_bytes > 0 and not runs_bytes % RUN_BYTES

    def fields(self) -> npt.NDArray[Any]:
        """``use`` and the header's fields by name, and ``runs`` of (``start``, ``pages``). Only of
        whole values."""
        count = (self.shape[1] - RUNS_AT) // RUN_BYTES
        layout = [("key", f"V{self.key_bytes}"), *_VALUE.descr, ("runs", _RUN, (count,))]
        return self.rows.view(np.dtype(layout))


def tables_of(records: Mapping[Key, bytes]) -> Iterator[RecordTable]:
    """Keys and values as tables, one for each pair of lengths."""
    groups: dict[tuple[int, int], list[bytes]] = {}
    for key, value in records.items():
        groups.setdefault((len(key), len(value)), []).append(key + value)
    for (key_bytes, value_bytes), rows in groups.items():
        raw = np.frombuffer(b"".join(rows), f"V{key_bytes + value_bytes}")
        yield RecordTable(key_bytes, raw)

"""Records as arrays: the keys and values of an index, thousands at a time.

A value is the time of last use, the record's header and its extents (``lmdb.index``). A table holds
records whose keys have the same length and which have the same number of extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.base import Key, KeyColumn
from tiers.lmdb.records.rows import Rows
from tiers.record import HEADER_BYTES

USE_BYTES = 8
EXTENTS_AT = USE_BYTES + HEADER_BYTES
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
_EXTENT = np.dtype([("start", "<u8"), ("pages", "<u4")])
EXTENT_BYTES = _EXTENT.itemsize
assert _VALUE.itemsize == EXTENTS_AT, "the layout of a header"


class RecordTable:
    """Records of one shape: each row of ``memory`` is a key followed by its value."""

    def __init__(self, key_bytes: int, value_bytes: int, rows: int = 0) -> None:
        """Allocate memory for ``rows`` records at once."""
        self.key_bytes = key_bytes
        self.value_bytes = value_bytes
        self.memory = Rows(key_bytes + value_bytes, rows)

    @property
    def count(self) -> int:
        """The number of rows, including rows that no longer contain a record."""
        return self.memory.count

    def key_column(self) -> KeyColumn:
        """The rows as an array of voids, in place."""
        layout = [("key", f"V{self.key_bytes}"), ("value", f"V{self.value_bytes}")]
        return self.memory.array().view(layout)["key"]

    def keys(self, chosen: Any = slice(None)) -> list[Key]:
        """The keys of all rows, or of the given rows, in this order."""
        return self.key_column()[chosen].tolist()  # type: ignore[no-any-return]  # a void's item is bytes

    def value(self, row: int) -> bytes:
        """The value of one row."""
        at = row * self.memory.width
        return self.memory.memory[at + self.key_bytes : at + self.memory.width]

    def items(self) -> Iterator[tuple[Key, bytes]]:
        """All keys with their values."""
        return zip(self.keys(), map(self.value, range(self.count)), strict=True)

    @property
    def is_whole(self) -> bool:
        """True if values have the length of a header and at least one extent."""
        extents_bytes = self.value_bytes - EXTENTS_AT
        return extents_bytes > 0 and not extents_bytes % EXTENT_BYTES

    @property
    def extent_count(self) -> int:
        """Extents per record. Only for complete values."""
        return (self.value_bytes - EXTENTS_AT) // EXTENT_BYTES

    def fields(self) -> npt.NDArray[Any]:
        """Return ``use`` and the header's fields by name, and ``extents`` of (``start``,
        ``pages``), in place. Only for complete values."""
        layout = [
            ("key", f"V{self.key_bytes}"),
            *_VALUE.descr,
            ("extents", _EXTENT, (self.extent_count,)),
        ]
        return self.memory.array().view(np.dtype(layout))


def tables_of(records: Iterable[tuple[Key, bytes]]) -> list[RecordTable]:
    """Keys and values as tables, one for each pair of lengths."""
    groups: dict[tuple[int, int], list[bytes]] = {}
    for key, value in records:
        groups.setdefault((len(key), len(value)), []).append(key + value)
    tables = []
    for (key_bytes, value_bytes), rows in groups.items():
        table = RecordTable(key_bytes, value_bytes)
        table.memory.extend(np.frombuffer(b"".join(rows), f"V{key_bytes + value_bytes}"))
        tables.append(table)
    return tables


def with_use(value: bytes, use: int) -> bytes:
    """Return the value with another time of last use."""
    return use.to_bytes(USE_BYTES, "big") + value[USE_BYTES:]

"""The records of a disk tier in memory: a map from key to value, as in `tiers.lmdb.index`.

Records found at open stay in the rows into which they were read. Compared with objects, rows take
half the memory and a tenth of the time to load. Records written later are objects in a dict, which
is faster to use. Once half of the rows have been deleted, the remaining ones move to the dict, a
few at a time, and the rows' memory is released.

Owned by one thread at a time: first the one that opens the tier, then the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tiers.base import Key, StoredKeys
from tiers.lmdb.records.key_order import Part, keys_by_use
from tiers.lmdb.records.key_table import KeyTable
from tiers.lmdb.records.record_table import USE_BYTES, RecordTable, tables_of, with_use

MOVED_AT_ONCE = 4
"""Number of rows that move per deletion. All rows have moved before another tenth of them is
deleted."""

_Numbers = npt.NDArray[np.int64]


class RecordMap:
    """A mapping of keys to values."""

    def __init__(
        self,
        tables: Sequence[RecordTable] = (),
        good: Sequence[npt.NDArray[np.bool_]] = (),
    ) -> None:
        """Begin with the rows of ``tables`` that are ``good``. Takes over the table with the most
        good rows; records of the other tables become objects."""
        self._objects: dict[Key, bytes] = {}
        self._begin(RecordTable(1, 1))
        counts = [np.count_nonzero(mask) for mask in good]
        for number, (table, mask) in enumerate(zip(tables, good, strict=True)):
            if counts[number] and counts[number] == max(counts) and not self._slots.count:
                self._begin(table, None if mask.all() else np.flatnonzero(mask))
            elif counts[number]:
                chosen = zip(table.items(), mask.tolist(), strict=True)
                self._objects.update(item for item, is_good in chosen if is_good)

    def _begin(self, table: RecordTable, rows: _Numbers | None = None) -> None:
        self._table = table
        self._memory, self._width = table.memory.memory, table.memory.width
        self._key_bytes = table.key_bytes
        self._slots = KeyTable(table.memory, table.key_bytes, rows)

    def __len__(self) -> int:
        return len(self._objects) + self._slots.count

    def __contains__(self, key: Key) -> bool:
        return key in self._objects or (self._slots.count > 0 and self._slots.find(key) >= 0)

    def get(self, key: Key) -> bytes | None:
        """The value, or ``None``."""
        value = self._objects.get(key)
        if value is None and self._slots.count:
            row = self._slots.find(key)
            if row >= 0:
                return self._memory[row + self._key_bytes : row + self._width]
        return value

    def add(self, key: Key, value: bytes) -> None:
        """Add a key that is not present."""
        self._objects[key] = value

    def pop(self, key: Key) -> bytes | None:
        """Remove a key and return its value, or ``None``."""
        value = self._objects.pop(key, None)
        if value is None and self._slots.count:
            row = self._slots.remove(key)
            if row >= 0:
                value = self._memory[row + self._key_bytes : row + self._width]
                if 2 * self._slots.count < self._table.count:
                    self._move_some()
        return value

    def _move_some(self) -> None:
        """Turn a few rows into objects; after the last one, release the memory."""
        memory, key_bytes = self._memory, self._key_bytes
        for _ in range(min(MOVED_AT_ONCE, self._slots.count)):
            row = self._slots.remove_any()
            key = memory[row : row + key_bytes]
            self._objects[key] = memory[row + key_bytes : row + self._width]
        if not self._slots.count:
            self._begin(RecordTable(1, 1))

    def touch(self, key: Key, use: int) -> bool:
        """Set the time of last use. Returns True if the key is present."""
        value = self._objects.get(key)
        if value is not None:
            self._objects[key] = with_use(value, use)
            return True
        row = self._slots.find(key) if self._slots.count else -1
        if row >= 0:
            at = row + self._key_bytes
            self._memory[at : at + USE_BYTES] = use.to_bytes(USE_BYTES, "big")
        return row >= 0

    def clear(self) -> None:
        """Forget everything."""
        self._objects = {}
        self._begin(RecordTable(1, 1))

    def items(self) -> Iterator[tuple[Key, bytes]]:
        """All keys and values. Nothing may change during the iteration."""
        rows = self._slots.numbers()
        yield from zip(self._table.keys(rows), map(self._table.value, rows.tolist()), strict=True)
        yield from self._objects.items()

    def by_use(self) -> list[StoredKeys]:
        """A snapshot of all keys, least recently used first."""
        found = [Part(table) for table in tables_of(self._objects.items())]
        if self._slots.count:
            is_whole = self._slots.count == self._table.count
            found.append(Part(self._table, None if is_whole else self._slots.numbers()))
        return keys_by_use(found)

    def check(self) -> None:
        """Raise ``AssertionError`` if a key would not be found. For tests."""
        items = dict(self.items())
        assert len(items) == len(self), f"{len(items)} keys of {len(self)}"
        for key, value in items.items():
            assert self.get(key) == value, key.hex()

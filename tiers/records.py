"""The records of a disk tier in memory: key -> value (``lmdb_index``).

What was found at open stays in the arrays in which it was read: a million values as objects would
cost a third of a second and 150 MB more. What is written or used later is a value of its own.

Owned by the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from tiers.base import Key
from tiers.lmdb_index import uses_and_payloads
from tiers.recover import Recovered

Numbers = npt.NDArray[np.int64]


class Records:
    """A mapping, in the order in which keys were set; those found at open in the order of use."""

    def __init__(self, found: Recovered) -> None:
        """Takes ``found.rows`` over."""
        self._entries: dict[Key, int | bytes] = found.rows  # type: ignore[assignment]  # ours from now on
        self._tables = found.tables
        self._starts = [0, *accumulate(table.rows.size for table in found.tables)]
        self._uses, self._payload_bytes = found.uses, found.payload_bytes
        self._is_as_found = True

    def _value(self, entry: int | bytes) -> bytes:
        if isinstance(entry, bytes):
            return entry
        table = bisect_right(self._starts, entry) - 1
        return self._tables[table].value(entry - self._starts[table])

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __setitem__(self, key: Key, value: bytes) -> None:
        self._is_as_found = False
        self._entries[key] = value

    def get(self, key: Key) -> bytes | None:
        """The value, or ``None``."""
        entry = self._entries.get(key)
        return None if entry is None else self._value(entry)

    def pop(self, key: Key) -> bytes | None:
        """Take a key out: its value, or ``None``."""
        entry = self._entries.pop(key, None)
        return None if entry is None else self._value(entry)

    def clear(self) -> None:
        """Forget everything, also what was read at open."""
        self._entries, self._tables = {}, []

    def values(self) -> list[bytes]:
        """All values."""
        return [self._value(entry) for entry in self._entries.values()]

    def by_use(self) -> tuple[list[Key], list[int]]:
        """All keys, least recently used first, and the lengths of their payloads."""
        entries = list(self._entries.values())
        if self._is_as_found:
            rows = np.fromiter(entries, np.int64, len(entries))
            uses, sizes = self._uses[rows], self._payload_bytes[rows]
        else:
            fields = uses_and_payloads([self._value(entry) for entry in entries])
            uses = fields["use"].astype(np.int64)
            sizes = fields["payload_bytes"].astype(np.int64)
        keys = list(self._entries)
        if not (uses[1:] > uses[:-1]).all():
            order = np.argsort(uses, kind="stable")
            sizes = sizes[order]
            keys = [keys[position] for position in order.tolist()]
        return keys, sizes.tolist()

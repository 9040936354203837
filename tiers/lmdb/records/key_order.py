"""Lists all keys of an index in the order of their last use, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.base import KeyColumn, StoredKeys, stored_keys
from tiers.lmdb.records.record_table import RecordTable
from tiers.lmdb.records.rows import Rows

ORDERED_AT_ONCE = 1 << 13
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a table, in ascending order (``None``: all)."""

    table: RecordTable
    rows: _Numbers | None = None

    def keys(self) -> KeyColumn:
        """The keys of these rows."""
        column = self.table.key_column()
        return column if self.rows is None else column[self.rows]

    def column(self, name: str) -> _Numbers:
        """Return one of the ``fields`` of a table."""
        column = self.table.fields()[name]
        return (column if self.rows is None else column[self.rows]).astype(np.int64)


def keys_by_use(parts: Sequence[Part]) -> list[StoredKeys]:
    """Return the keys of all these records, least recently used first."""
    if not parts:
        return []
    order = rising(_joined([part.column("use") for part in parts]))
    sizes = _joined([part.column("payload_bytes") for part in parts])
    if len({part.table.key_bytes for part in parts}) > 1:
        keys = [key for part in parts for key in part.keys().tolist()]
        by_use = map(keys.__getitem__, order.tolist())
        return list(stored_keys(zip(by_use, sizes[order].tolist(), strict=True)))
    if (sizes == sizes[0]).all():
        sizes = np.broadcast_to(sizes[0], sizes.shape)  # one number instead of a million equal ones
    else:
        sizes = sizes[order]
    return [StoredKeys(_taken(_joined([part.keys() for part in parts]), order), sizes)]


def _taken(column: KeyColumn, order: _Numbers) -> KeyColumn:
    """Return ``column[order]``. Working in parts that fit into the processor's cache, and in memory
    without huge pages (``rows``), halves the time."""
    taken = Rows(column.itemsize, order.size)
    for start in range(0, order.size, ORDERED_AT_ONCE):
        taken.extend(column[order[start : start + ORDERED_AT_ONCE]])
    return taken.array()


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate arrays. A single array is returned without a copy, because copying a million keys
    is slow."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rising(numbers: _Numbers) -> _Numbers:
    """Like ``argsort``, but with equal values in any order.

    This puts each number's index into its low bits and sorts the numbers, which takes a fifth to a
    half of the time of ``argsort``: numpy uses vector instructions for ``sort`` on most processors,
    but for ``argsort`` only on a few. If the range of values is so large that the index displaces
    low bits, a second sort completes the order; at that point only neighbours are out of order.
    """
    if not numbers.size:
        return np.zeros(0, np.int64)
    position_bits = numbers.size.bit_length()
    least = int(numbers.min())
    lost_bits = max(0, (int(numbers.max()) - least).bit_length() + position_bits - 64)
    carrying = (numbers - least).view(np.uint64)
    carrying >>= np.uint64(lost_bits)
    carrying <<= np.uint64(position_bits)
    carrying |= np.arange(numbers.size, dtype=np.uint64)
    carrying.sort()
    carrying &= np.uint64((1 << position_bits) - 1)
    order = carrying.view(np.int64)
    if lost_bits:
        sorted_so_far = numbers[order]
        if (sorted_so_far[1:] < sorted_so_far[:-1]).any():
            order = order[np.argsort(sorted_so_far, kind="stable")]
    return order

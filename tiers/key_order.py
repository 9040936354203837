"""All keys of an index in the order of their use, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.base import KeyColumn, StoredKeys, stored_keys
from tiers.record_table import RecordTable

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a table, in rising order (``None``: all)."""

    table: RecordTable
    rows: _Numbers | None = None

    def keys(self) -> KeyColumn:
        """Their keys."""
        column = self.table.key_column()
        return column if self.rows is None else column[self.rows]

    def column(self, name: str) -> _Numbers:
        """One of the ``fields`` of a table."""
        column = self.table.fields()[name]
        return (column if self.rows is None else column[self.rows]).astype(np.int64)


def keys_by_use(parts: Sequence[Part]) -> list[StoredKeys]:
    """The keys of all these, least recently used first."""
    if not parts:
        return []
    order = np.argsort(_joined([part.column("use") for part in parts]))
    sizes = _joined([part.column("payload_bytes") for part in parts])
    if len({part.table.key_bytes for part in parts}) > 1:
        keys = [key for part in parts for key in part.keys().tolist()]
        by_use = map(keys.__getitem__, order.tolist())
        return list(stored_keys(zip(by_use, sizes[order].tolist(), strict=True)))
    if (sizes == sizes[0]).all():
        sizes = np.broadcast_to(sizes[0], sizes.shape)  # no memory for a million equal numbers
    else:
        sizes = sizes[order]
    return [StoredKeys(_joined([part.keys() for part in parts])[order], sizes)]


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One after the other; a single one as it is, for a copy of a million is worth avoiding."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

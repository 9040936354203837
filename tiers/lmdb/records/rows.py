"""Memory for millions of rows of equal length, numbered from 0.

It is one private mapping: growing it moves pages instead of bytes, and rows that were never written
take no memory. It avoids huge pages: access would be faster, but on a virtual machine without free
huge pages allocation takes several times as long.

Owned by one thread at a time.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

BYTES_MIN = 1 << 16


class Rows:
    """See the module's docstring. ``memory`` may be read and written in place, row ``n`` at ``n *
    width``; it stays the same object."""

    def __init__(self, width: int, rows: int = 0) -> None:
        """``width`` is the bytes per row; memory for ``rows`` rows is allocated at once."""
        self.width = width
        self.count = 0
        self._bytes = max(BYTES_MIN, rows * width)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self._bytes, flags=flags)

    def array(self) -> npt.NDArray[np.void]:
        """All rows, in place. No reference to the array may exist when rows are added."""
        return np.frombuffer(self.memory, f"V{self.width}", self.count)

    def extend(self, rows: npt.NDArray[np.void]) -> None:
        """Append rows; they get the numbers from ``count`` on."""
        start, stop = self.count, self.count + rows.size
        if stop * self.width > self._bytes:
            self._bytes = max(2 * self._bytes, stop * self.width)
            self.memory.resize(self._bytes)
        self.count = stop
        self.array()[start:] = rows

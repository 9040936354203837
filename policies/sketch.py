"""A frequency sketch: how often a key was seen lately, in a few bytes per key.

G. Cormode, S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its
applications", J. Algorithms 55(1), 2005; with 4-bit counts that are halved from time to time, as
in TinyLFU (G. Einziger, R. Friedman, B. Manes, ACM TOS 13(4), 2017).
"""

from __future__ import annotations

import zlib

from policies.base import Key

_MOST = 15
_ROWS = 4
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
_MASK = (1 << 64) - 1


def stable_hash(key: Key) -> int:
    """A hash that is the same in every process (``hash`` of bytes is seeded per process)."""
    if isinstance(key, (bytes, bytearray)):
        return zlib.crc32(key) * _MIX[0] & _MASK
    return hash(key) * _MIX[0] & _MASK


class FrequencySketch:
    """Four rows of counts up to 15 for about ``width`` keys; never counts too few until aged.

    After ``10 * width`` additions all counts are halved.
    """

    __slots__ = ("_bits", "_left", "_rows", "width")

    def __init__(self, width: int) -> None:
        self._bits = max(4, (max(1, width) - 1).bit_length())
        self.width = 1 << self._bits
        self._rows = [bytearray(self.width) for _ in range(_ROWS)]
        self._left = 10 * self.width

    def add(self, key: Key) -> int:
        """Count one occurrence; returns the new estimate."""
        base = stable_hash(key)
        shift = 64 - self._bits
        places = [(base * mix & _MASK) >> shift for mix in _MIX]
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._left -= 1
        if self._left == 0:
            self._age()
        return min(least + 1, _MOST)

    def estimate(self, key: Key) -> int:
        """How often the key was added lately, at most 15; may be too high, by collisions."""
        base = stable_hash(key)
        shift = 64 - self._bits
        return min(
            row[(base * mix & _MASK) >> shift] for row, mix in zip(self._rows, _MIX, strict=True)
        )

    def clear(self) -> None:
        """Forget all counts."""
        self._rows = [bytearray(self.width) for _ in range(_ROWS)]
        self._left = 10 * self.width

    def _age(self) -> None:
        halves = bytes(count >> 1 for count in range(256))
        self._rows = [row.translate(halves) for row in self._rows]
        self._left = 5 * self.width

"""A frequency sketch: estimates how often a key was seen recently, in eight bytes per key.

G. Cormode, S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its
applications", J. Algorithms 55(1), 2005; with 4-bit counts that are halved from time to time, as
in TinyLFU (G. Einziger, R. Friedman, B. Manes, ACM TOS 13(4), 2017).
"""

from __future__ import annotations

import zlib

from policies.base import Key

COUNT_MAX = 15
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def stable_hash(key: Key) -> int:
    """A 64-bit hash that is the same in every process (``hash`` of bytes is seeded per process)."""
    if isinstance(key, bytes):
        return (zlib.crc32(key) + 1) * _MIX & _MASK
    return (hash(key) + 1) * _MIX & _MASK


class FrequencySketch:
    """Two rows of counts up to 15 for about ``width`` keys; a count is never too low before the
    first halving.

    After ``10 * width`` additions all counts are halved. Rows have four counts per key.
    """

    __slots__ = ("_left", "_mask", "_one", "_two", "width")

    def __init__(self, width: int) -> None:
        self.width = 1 << max(4, (max(1, width) - 1).bit_length())
        self._mask = 4 * self.width - 1
        self.clear()

    def add(self, key: Key) -> int:
        """Count one occurrence; returns the new estimate."""
        mixed = stable_hash(key)
        first, second = mixed >> 20 & self._mask, mixed >> 36 & self._mask
        one, two = self._one[first], self._two[second]
        count = one if one < two else two
        if count < COUNT_MAX:
            count += 1
            if one < count:
                self._one[first] = count
            if two < count:
                self._two[second] = count
        self._left -= 1
        if not self._left:
            self._age()
        return count

    def estimate(self, key: Key) -> int:
        """Estimate how often the key was added recently, up to 15. Collisions raise the
        estimate."""
        mixed = stable_hash(key)
        one, two = self._one[mixed >> 20 & self._mask], self._two[mixed >> 36 & self._mask]
        return one if one < two else two

    def clear(self) -> None:
        """Forget all counts."""
        self._one = bytearray(self._mask + 1)
        self._two = bytearray(self._mask + 1)
        self._left = 10 * self.width

    def _age(self) -> None:
        halves = bytes(count >> 1 for count in range(256))
        self._one, self._two = self._one.translate(halves), self._two.translate(halves)
        self._left = 5 * self.width

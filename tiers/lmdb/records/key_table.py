"""A hash table from keys to rows, built in one pass over rows that begin with their keys.

A dict of a million keys takes half a second to build and keeps a million objects alive. Here the
keys stay in their rows (``rows``) and the table is built by sorting an array. A lookup takes almost
a microsecond, several times as long as a dict's. Keys can be removed but not added.

    slots     u64 each: (home + 1) << 32 | number of the row + 1; 0 is empty
    home      (the key as a little-endian number) mod (2**61 - 1) mod the number of homes

The table uses open addressing with linear probing: an entry is in the first free slot at or after
its home. Probing does not wrap around: a few slots after the last home hold the overflow, and the
last slot is always empty. Removing a key clears only the row in its slot. The key mod (2**61 - 1)
equals Python's ``hash`` of the number (``sys.hash_info.modulus``). It is cheap to compute for
arrays, since 2**64 mod (2**61 - 1) is 8.

Owned by one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tiers.lmdb.records.rows import Rows

MODULUS = (1 << 61) - 1
assert sys.hash_info.modulus == MODULUS, "a 64-bit Python"
HOMES_PER_KEY = 2
HASHED_AT_ONCE = 1 << 12
"""Number of rows hashed at a time, so that they stay in the processor's cache."""

_Numbers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_LOW = (1 << 32) - 1


class KeyTable:
    """See the module's docstring. ``count`` is the number of keys, at most 2**32 - 2."""

    def __init__(self, rows: Rows, key_bytes: int, numbers: _Numbers | None = None) -> None:
        """Build the table over the rows ``numbers``, which are in ascending order (``None``: all
        rows). The keys must be distinct and ``key_bytes`` long."""
        self._memory, self._width, self._key_bytes = rows.memory, rows.width, key_bytes
        self.count = rows.count if numbers is None else numbers.size
        self._homes = HOMES_PER_KEY * self.count | 1
        self._cursor = 0
        entries = np.empty(self.count, np.uint64)
        for part, found in _remainders_of(rows.array(), key_bytes, numbers):
            chosen = np.arange(part.start, part.stop) if numbers is None else numbers[part]
            homes = found % np.uint64(self._homes) + np.uint64(1)
            entries[part] = homes << np.uint64(32) | (chosen + 1).astype(np.uint64)
        entries.sort()
        self._slots = memoryview(_placed(entries, self._homes))  # type: ignore[arg-type]  # arrays are buffers

    def numbers(self) -> _Numbers:
        """Return the rows of all keys, in ascending order."""
        entries = np.asarray(self._slots) & np.uint64(_LOW)
        found: _Numbers = entries[entries != 0].astype(np.int64)
        found -= 1
        found.sort()
        return found

    def _find(self, key: bytes) -> int:
        """Return the slot that holds this key, or -1."""
        slots = self._slots
        at = hash(int.from_bytes(key, "little")) % self._homes
        mark = at + 1
        while entry := slots[at]:
            if entry >> 32 == mark:
                start = ((entry & _LOW) - 1) * self._width
                if start >= 0 and self._memory[start : start + self._key_bytes] == key:
                    return at
            at += 1
        return -1

    def find(self, key: bytes) -> int:
        """Return the position in memory of this key's row, or -1."""
        at = self._find(key)
        return at if at < 0 else ((self._slots[at] & _LOW) - 1) * self._width

    def remove(self, key: bytes) -> int:
        """Remove a key and return the position of its row, or -1. The row itself is not changed."""
        at = self._find(key)
        return at if at < 0 else self._leave(at)

    def remove_any(self) -> int:
        """Remove any key and return the position of its row, or -1 if none is left."""
        slots = self._slots
        while self._cursor < len(slots):
            if slots[self._cursor] & _LOW:
                return self._leave(self._cursor)
            self._cursor += 1
        return -1

    def _leave(self, at: int) -> int:
        entry = self._slots[at]
        self._slots[at] = entry >> 32 << 32
        self.count -= 1
        return ((entry & _LOW) - 1) * self._width


def _placed(entries: _Words, homes: int) -> _Words:
    """Return the slots. ``entries`` are sorted by home; each goes to its home, or to the slot after
    the previous entry if that is further."""
    slots = np.zeros(homes + 1, np.uint64)
    last = -1
    for start in range(0, entries.size, HASHED_AT_ONCE):
        part = entries[start : start + HASHED_AT_ONCE]
        steps = np.arange(part.size)
        positions = (part >> np.uint64(32)).astype(np.int64)
        positions -= 1 + steps
        positions[0] = max(int(positions[0]), last + 1)
        np.maximum.accumulate(positions, out=positions)
        positions += steps
        last = int(positions[-1])
        if last + 1 >= slots.size:
            slots = np.concatenate((slots, np.zeros(last + 2 - slots.size, np.uint64)))
        slots[positions] = part
    return slots


def _remainders_of(
    rows: npt.NDArray[np.void], key_bytes: int, numbers: _Numbers | None
) -> Iterator[tuple[slice, _Words]]:
    """Iterate over the ``remainders`` of some rows (``None``: all), part by part."""
    count = rows.size if numbers is None else numbers.size
    raw = rows.view(np.uint8).reshape(rows.size, rows.itemsize)[:, :key_bytes]
    padded = np.zeros((HASHED_AT_ONCE, -(-key_bytes // 8) * 8), np.uint8)
    for start in range(0, count, HASHED_AT_ONCE):
        part = slice(start, min(count, start + HASHED_AT_ONCE))
        keys = raw[part] if numbers is None else raw[numbers[part]]
        padded[: len(keys), :key_bytes] = keys
        yield part, remainders(padded[: len(keys)].view("<u8"))


def remainders(words: _Words) -> _Words:
    """Return each row, a number of 64-bit words with the lowest first, modulo 2**61 - 1.

    Modulo 2**61 - 1, multiplying by a power of two is a rotation of 61 bits.
    """
    mask, bits = np.uint64(MODULUS), np.uint64(61)
    total = np.zeros(len(words), np.uint64)
    for position in range(words.shape[1]):
        word = words[:, position]
        turn = np.uint64(3 * position % 61)
        turned = word << turn
        turned &= mask
        total += turned
        total += word >> bits - turn
        over = total >> bits
        total &= mask
        total += over
    total %= mask
    return total

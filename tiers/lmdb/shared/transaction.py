"""A write transaction of a shared index: it reserves, fills and frees allocations.

A record is stored in three steps, so that a process can be killed safely at any moment:

    reserve   one transaction gives extents to this process (an intent)
    (the payload is written and flushed)
    publish   one transaction names the record and removes the intent

Any process can roll back an intent of an ended process, which frees the extents. Publishing has no
effect if the intent is gone.

Extents may be reused while a reader still reads the old contents. Nothing waits for readers: a
reader detects reuse by the checksum, which covers key and epoch, and looks up the key again
(``shared.reads``).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiers.base import Key, WriteOutcome
from tiers.io.extents import Extent, Extents, clip
from tiers.lmdb.index import EXTENT, READER_CHECK_EVERY, extents_of
from tiers.lmdb.io_jobs import Put
from tiers.lmdb.records.record_table import USE_BYTES, with_use
from tiers.lmdb.shared.free_extents import FreeExtents
from tiers.lmdb.shared.index import SharedIndex, epoch_of

EVICTED_AT_ONCE = 1024
"""Maximum number of records that one transaction evicts. It is limited because other processes wait
for the transaction."""
_INTENT = struct.Struct(">HQ")

Grow = Callable[[int, int], int]
"""``grow(file_pages, pages)`` extends the file by at least ``pages`` and returns the pages gained
(0 if it cannot grow)."""


@dataclass(slots=True)
class ReservedExtents:
    """The result of a reservation, by record. ``allocations[i]`` is ``None`` if there is no space,
    or if the record is already ``present[i]``. ``uses[i]`` is its time of use; ``epoch`` is the
    epoch with which to seal all records."""

    epoch: int
    allocations: list[Extents | None]
    present: list[bool]
    uses: list[int]


class WriteTransaction:
    """One write transaction of the sharer with this ``number``. Any exception rolls back all of
    it."""

    def __init__(self, index: SharedIndex, txn: Any, number: int) -> None:
        self._index = index
        self._txn = txn
        self._tables = index.tables
        self._number = number
        self.state = index.state_in(txn)
        self._free = FreeExtents(txn, self._tables.free, self.state.cursor, self.state.free_pages)

    def store_state(self) -> None:
        self.state.store_free(self._free.cursor, self._free.pages)
        self._txn.put(b"state", self.state.dump(), db=self._tables.meta)

    @property
    def free_pages(self) -> int:
        return self._free.pages

    def _epoch(self, own_epoch: int | None) -> int:
        return self._index.common_epoch_in(self._txn) if own_epoch is None else own_epoch

    # -- storing records ----------------------------------------------------------------------

    def reserve(
        self,
        wanted: Sequence[tuple[Key, int]],
        own_epoch: int | None,
        records_max: int,
        grow: Grow,
    ) -> ReservedExtents:
        """Allocate the given number of pages for each key, as far as there is space."""
        epoch, state = self._epoch(own_epoch), self.state
        found = ReservedExtents(epoch, [], [], [])
        for key, pages in wanted:
            value = self._txn.get(key, db=self._tables.records)
            is_present = value is not None and epoch_of(value) == epoch
            extents = None
            if not is_present and state.records + state.reserved < records_max:
                extents = self._take(pages, grow)
            if extents is not None:
                packed = b"".join(EXTENT.pack(*extent) for extent in extents)
                self._txn.put(self._intent(extents), packed, db=self._tables.intents)
                state.reserve()
            found.allocations.append(extents)
            found.present.append(is_present)
            found.uses.append(self._next_use())
        return found

    def _take(self, pages: int, grow: Grow) -> Extents | None:
        extents = self._free.take(pages)
        if extents is None:
            gain = grow(self.state.file_pages, pages)
            if gain:
                self._free.give((Extent(self.state.file_pages, gain),))
                self.state.grow(gain)
                extents = self._free.take(pages)
        return extents

    def _intent(self, extents: Extents) -> bytes:
        return _INTENT.pack(self._number, extents[0].start)

    def publish(self, puts: Sequence[Put], own_epoch: int | None) -> None:
        """Make records visible, whose payloads must have been flushed, and set their outcomes."""
        epoch = self._epoch(own_epoch)
        for put in puts:
            put.note_outcome(self._publish(put, epoch))

    def _publish(self, put: Put, epoch: int) -> WriteOutcome:
        if not self._end_intent(put.extents):
            return WriteOutcome.FAILED  # rolled back: the extents belong to another process
        value = self._txn.get(put.key, db=self._tables.records)
        is_present = value is not None and epoch_of(value) == epoch
        if put.epoch != epoch or is_present:
            self._free.give(put.extents)
            return WriteOutcome.OK if put.epoch == epoch else WriteOutcome.FAILED
        if value is not None:  # a record of an epoch that other processes use, or that has ended
            self._forget(put.key, value)
        _, rest = clip(put.extents, put.stored_pages)
        self._free.give(rest)
        self._store(put.key, put.value)
        self.state.add_record()
        return WriteOutcome.OK

    def abandon(self, allocations: Sequence[Extents]) -> None:
        """Free allocations to which nothing was written."""
        for extents in allocations:
            if self._end_intent(extents):
                self._free.give(extents)

    def _end_intent(self, extents: Extents) -> bool:
        was_there = bool(self._txn.delete(self._intent(extents), db=self._tables.intents))
        if was_there:
            self.state.end_intent()
        return was_there

    def _store(self, key: Key, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables.records)
        self._txn.put(value[:USE_BYTES], key, db=self._tables.order)

    def _next_use(self) -> int:
        return self.state.take_use(time.time_ns())

    # -- deleting records ---------------------------------------------------------------------

    def _forget(self, key: Key, value: bytes) -> None:
        self._free.give(extents_of(value))
        self._txn.delete(value[:USE_BYTES], db=self._tables.order)
        self._txn.delete(key, db=self._tables.records)
        self.state.remove_record()

    def remove(self, keys: Sequence[Key], own_epoch: int | None) -> int:
        """Delete the caller's records and return their number."""
        epoch, count = self._epoch(own_epoch), 0
        for key in keys:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None and epoch_of(value) == epoch:
                self._forget(key, value)
                count += 1
        return count

    def remove_damaged(self, found: Sequence[tuple[Key, bytes]]) -> None:
        """Delete records unless they have changed since they were read."""
        for key, seen in found:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None and value[USE_BYTES:] == seen[USE_BYTES:]:
                self._forget(key, value)

    def refresh(self, keys: Sequence[Key]) -> None:
        """Record a use of these keys, in this order."""
        for key in keys:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None:
                self._store(key, with_use(value, self._next_use()))
                self._txn.delete(value[:USE_BYTES], db=self._tables.order)

    def evict(self, free_pages: int, records_max: int) -> int:
        """Evict the least recently used records until enough pages are free and few enough records
        and intents remain, at most ``EVICTED_AT_ONCE`` records. Returns the number of evicted
        records."""
        count = 0
        while count < EVICTED_AT_ONCE and (
            self._free.pages < free_pages or self.state.records + self.state.reserved > records_max
        ):
            with self._txn.cursor(db=self._tables.order) as oldest:
                if not oldest.first():
                    break
                key = oldest.value()
            self._forget(key, self._txn.get(key, db=self._tables.records))
            count += 1
        self.state.evict(count)
        return count

    # -- other processes ----------------------------------------------------------------------

    def roll_back(self, is_alive: Callable[[int], bool]) -> int:
        """Free the allocations of ended sharers and return their number."""
        return sum(self.roll_back_one(n) for n in list(self._members()) if not is_alive(n))

    def _members(self) -> Iterator[int]:
        """Return the numbers of sharers that have intents."""
        with self._txn.cursor(db=self._tables.intents) as intents:
            there = intents.first()
            while there:
                number, _start = _INTENT.unpack(intents.key())
                yield number
                there = intents.set_range(_INTENT.pack(number, 2**64 - 1))

    def roll_back_one(self, number: int) -> int:
        """Free every allocation that the sharer with this number has reserved."""
        count = 0
        with self._txn.cursor(db=self._tables.intents) as intents:
            while intents.set_range(_INTENT.pack(number, 0)):
                if _INTENT.unpack(intents.key())[0] != number:
                    break
                packed = intents.value()
                intents.delete()
                extents = [Extent(*extent) for extent in EXTENT.iter_unpack(packed)]
                self._free.give(extents)
                count += 1
        self.state.roll_back(count)
        return count

    def begin_epoch(self, own_epoch: int | None) -> int:
        """Begin an epoch that no process has ever used, for the caller alone. No process can read
        records of the caller's previous epoch any more. If that was the common epoch, a new common
        epoch begins."""
        epoch = self.state.begin_epoch()
        if own_epoch is None:
            self._begin_common_epoch()
        return epoch

    def pass_epoch(self, noted: int) -> bool:
        """Begin a common epoch beyond ``noted``, which a tier that does not share has begun, unless
        the present one is at least ``noted``. Returns whether it did."""
        if self._index.common_epoch_in(self._txn) >= noted:
            return False
        self.state.see_epoch(noted)
        self._begin_common_epoch()
        return True

    def _begin_common_epoch(self) -> None:
        common = self.state.begin_epoch(is_common=True).to_bytes(8, "little")
        self._txn.put(b"epoch", common, db=self._tables.meta)


@contextmanager
def changing(index: SharedIndex, number: int) -> Iterator[WriteTransaction]:
    """Begin a write transaction, durable at the end. Raises ``lmdb.Error`` and ``OSError``."""
    with index.writing() as txn:
        if not txn.id() % READER_CHECK_EVERY:
            index.env.reader_check()
        changes = WriteTransaction(index, txn, number)
        yield changes
        changes.store_state()

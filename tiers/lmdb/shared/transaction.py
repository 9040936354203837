"""What one write transaction of a shared index does: places given out, filled, taken back.

A record comes into being in three steps, so that a process may be killed at any moment:

    reserve   a place is given to this process (an intent), in a transaction
    (the payload is written and flushed)
    publish   the record is named and the intent is gone, in one transaction

An intent of a process that has ended is rolled back by any other one: its place is free. A process
that publishes without its intent publishes nothing.

A place may be given out anew while somebody still reads what lay there. Nobody is asked: readers
find out by the checksum, which covers key and epoch, and look the key up again (``shared_reads``).
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
from tiers.lmdb.changes import Put
from tiers.lmdb.index import extents_of
from tiers.lmdb.recovery.record_table import EXTENT_BYTES, USE_BYTES, with_use
from tiers.lmdb.shared.free_extents import FreeExtents
from tiers.lmdb.shared.index import SharedIndex, epoch_of

EVICTED_AT_ONCE = 1024
"""Records that one transaction evicts at most: others wait for it."""
READER_CHECK_EVERY = 64
_EXTENT = struct.Struct("<QI")
assert _EXTENT.size == EXTENT_BYTES, "the layout of a run"
_INTENT = struct.Struct(">HQ")

Grow = Callable[[int, int], int]
"""``grow(file_pages, pages)`` makes the file longer by at least ``pages``, and says by how many
(0: it cannot)."""


@dataclass(slots=True)
class Reservation:
    """``places[i]`` for the i-th record, ``None`` if there is no room or it is ``present[i]``
    already; ``epoch`` is what they must be sealed with, ``uses[i]`` their time of use."""

    epoch: int
    allocations: list[Extents | None]
    present: list[bool]
    uses: list[int]


class WriteTransaction:
    """One write transaction, for the sharer with this ``number``. Any exception undoes it all."""

    def __init__(self, index: SharedIndex, txn: Any, number: int) -> None:
        self._index = index
        self._txn = txn
        self._tables = index.tables
        self._number = number
        self.state = index.state_in(txn)
        self._free = FreeExtents(txn, self._tables.free, self.state.cursor, self.state.free_pages)

    def store_state(self) -> None:
        self.state.cursor, self.state.free_pages = self._free.cursor, self._free.pages
        self._txn.put(b"state", self.state.dump(), db=self._tables.meta)

    @property
    def free_pages(self) -> int:
        return self._free.pages

    def _epoch(self, own_epoch: int | None) -> int:
        return self._index.common_epoch_in(self._txn) if own_epoch is None else own_epoch

    # -- a record's way into the store -----------------------------------------------------

    def reserve(
        self,
        wanted: Sequence[tuple[Key, int]],
        own_epoch: int | None,
        records_max: int,
        grow: Grow,
    ) -> Reservation:
        """Places for keys that need so many pages each, as far as there is room."""
        epoch, state = self._epoch(own_epoch), self.state
        found = Reservation(epoch, [], [], [])
        for key, pages in wanted:
            value = self._txn.get(key, db=self._tables.records)
            is_present = value is not None and epoch_of(value) == epoch
            extents = None
            if not is_present and state.records + state.reserved < records_max:
                extents = self._take(pages, grow)
            if extents is not None:
                packed = b"".join(_EXTENT.pack(*extent) for extent in extents)
                self._txn.put(self._intent(extents), packed, db=self._tables.intents)
                state.reserved += 1
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
                self.state.file_pages += gain
                extents = self._free.take(pages)
        return extents

    def _intent(self, extents: Extents) -> bytes:
        return _INTENT.pack(self._number, extents[0].start)

    def publish(self, puts: Sequence[Put], own_epoch: int | None) -> None:
        """Name records whose payloads are flushed; sets their outcomes."""
        epoch = self._epoch(own_epoch)
        for put in puts:
            put.outcome = self._publish(put, epoch)

    def _publish(self, put: Put, epoch: int) -> WriteOutcome:
        if not self._end_intent(put.extents):
            return WriteOutcome.FAILED  # rolled back: the place is somebody else's
        value = self._txn.get(put.key, db=self._tables.records)
        is_present = value is not None and epoch_of(value) == epoch
        if put.epoch != epoch or is_present:
            self._free.give(put.extents)
            return WriteOutcome.OK if put.epoch == epoch else WriteOutcome.FAILED
        if value is not None:  # of an epoch that others work under, or nobody any more
            self._forget(put.key, value)
        _, rest = clip(put.extents, put.stored_pages)
        self._free.give(rest)
        self._store(put.key, put.value)
        self.state.records += 1
        return WriteOutcome.OK

    def abandon(self, allocations: Sequence[Extents]) -> None:
        """Give back places that nothing was written to."""
        for extents in allocations:
            if self._end_intent(extents):
                self._free.give(extents)

    def _end_intent(self, extents: Extents) -> bool:
        was_there = bool(self._txn.delete(self._intent(extents), db=self._tables.intents))
        self.state.reserved -= was_there
        return was_there

    def _store(self, key: Key, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables.records)
        self._txn.put(value[:USE_BYTES], key, db=self._tables.order)

    def _next_use(self) -> int:
        use = max(self.state.next_use, time.time_ns())
        self.state.next_use = use + 1
        return use

    # -- and out of it ---------------------------------------------------------------------

    def _forget(self, key: Key, value: bytes) -> None:
        self._free.give(extents_of(value))
        self._txn.delete(value[:USE_BYTES], db=self._tables.order)
        self._txn.delete(key, db=self._tables.records)
        self.state.records -= 1

    def remove(self, keys: Sequence[Key], own_epoch: int | None) -> int:
        """Forget the caller's records; how many there were."""
        epoch, count = self._epoch(own_epoch), 0
        for key in keys:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None and epoch_of(value) == epoch:
                self._forget(key, value)
                count += 1
        return count

    def remove_damaged(self, found: Sequence[tuple[Key, bytes]]) -> None:
        """Forget records that are still what was read."""
        for key, seen in found:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None and value[USE_BYTES:] == seen[USE_BYTES:]:
                self._forget(key, value)

    def refresh(self, keys: Sequence[Key]) -> None:
        """Note a use of these, in this order."""
        for key in keys:
            value = self._txn.get(key, db=self._tables.records)
            if value is not None:
                self._store(key, with_use(value, self._next_use()))
                self._txn.delete(value[:USE_BYTES], db=self._tables.order)

    def evict(self, free_pages: int, records_most: int) -> int:
        """Forget the least recently used records until so many pages are free and at most so many
        records and intents are left, or ``EVICTED_AT_ONCE`` are gone; how many went."""
        count = 0
        while count < EVICTED_AT_ONCE and (
            self._free.pages < free_pages or self.state.records + self.state.reserved > records_most
        ):
            with self._txn.cursor(db=self._tables.order) as oldest:
                if not oldest.first():
                    break
                key = oldest.value()
            self._forget(key, self._txn.get(key, db=self._tables.records))
            count += 1
        self.state.evicted += count
        return count

    # -- others ----------------------------------------------------------------------------

    def roll_back(self, is_alive: Callable[[int], bool]) -> int:
        """Give back the places of sharers that have ended; how many."""
        return sum(self.roll_back_one(n) for n in list(self._sharers()) if not is_alive(n))

    def _sharers(self) -> Iterator[int]:
        """The numbers of sharers that have intents."""
        with self._txn.cursor(db=self._tables.intents) as intents:
            there = intents.first()
            while there:
                number, _start = _INTENT.unpack(intents.key())
                yield number
                there = intents.set_range(_INTENT.pack(number, 2**64 - 1))

    def roll_back_one(self, number: int) -> int:
        """Give back every place that was reserved under a number."""
        count = 0
        with self._txn.cursor(db=self._tables.intents) as intents:
            while intents.set_range(_INTENT.pack(number, 0)):
                if _INTENT.unpack(intents.key())[0] != number:
                    break
                packed = intents.value()
                intents.delete()
                extents = [Extent(*extent) for extent in _EXTENT.iter_unpack(packed)]
                self._free.give(extents)
                count += 1
        self.state.reserved -= count
        self.state.rolled_back += count
        return count

    def begin_epoch(self, own_epoch: int | None) -> int:
        """An epoch of the caller's own, that nobody ever had. What was stored under the one it
        leaves exists for nobody any more: if that was the common one, another becomes that."""
        self.state.highest += 1
        epoch = self.state.highest
        if own_epoch is None:
            self.state.highest += 1
            self.state.common = self.state.highest
            common = self.state.common.to_bytes(8, "little")
            self._txn.put(b"epoch", common, db=self._tables.meta)
        return epoch


@contextmanager
def changing(index: SharedIndex, number: int) -> Iterator[WriteTransaction]:
    """A write transaction, durable at the end. Raises ``lmdb.Error`` and ``OSError``."""
    with index.writing() as txn:
        if not txn.id() % READER_CHECK_EVERY:
            index.env.reader_check()
        changes = WriteTransaction(index, txn, number)
        yield changes
        changes.store_state()

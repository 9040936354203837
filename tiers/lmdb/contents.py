"""The records of an open LMDB tier: present ones, and those being written or deleted.

A deleted record leaves memory at once and the disk with the next commit; only then is its
allocation free (``allocations``). Uses are recorded in memory at once, and on disk with the next
commit, at most ``TOUCH_FLUSH_S`` later.

Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tiers.base import Key, WriteOutcome
from tiers.io.direct_io import pages_for
from tiers.io.extents import Extents
from tiers.io.threads import settled
from tiers.lmdb.allocations import Allocations
from tiers.lmdb.commit_thread import Clear, CommitThread, Refresh, Remove
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.index import extents_of
from tiers.lmdb.io_jobs import Put
from tiers.lmdb.options import TOUCH_FLUSH_S
from tiers.record import UseClock

TOUCHES_MAX = 4096


class LmdbContents:
    """``counts`` has the number of deleted records, ``filling`` the records being written, and
    ``epoch`` is the current epoch. ``committer`` takes the changes."""

    def __init__(self, files: LmdbFiles, committer: CommitThread) -> None:
        found = files.recovered
        self.epoch = files.index.epoch
        self.records = found.records
        self.allocations = Allocations(files.file_pages, found.free)
        self.uses = UseClock(found.next_use)
        self.filling: dict[Key, Put] = {}
        self.committer = committer
        self.counts = {"deleted": 0}
        self._loop = asyncio.get_running_loop()
        self._removals: dict[Remove | Clear, asyncio.Future[None]] = {}
        self._touched: set[Key] = set()
        self._touch_timer: asyncio.TimerHandle | None = None
        self._change = self._loop.create_future()

    # -- adding ------------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of records that are present or being written."""
        return len(self.records) + len(self.filling)

    def begin_write(self, key: Key, payload_bytes: int, epoch: int, records_max: int) -> Put | None:
        """Allocate pages for a new record of this epoch. Returns ``None`` if the epoch is over, the
        record is known, or there is no space now."""
        filling, records = self.filling, self.records
        if epoch != self.epoch or key in filling or key in records:
            return None
        if len(records) + len(filling) >= records_max:
            return None
        extents = self.allocations.allocate(pages_for(payload_bytes))
        if extents is None:
            return None
        put = filling[key] = Put(key, epoch, payload_bytes, extents)
        return put

    def end_write(self, put: Put) -> None:
        """Record that a write was committed or has failed. This may downgrade its outcome."""
        if self.filling.get(put.key) is put:
            del self.filling[put.key]
        if put.outcome is WriteOutcome.OK and put.epoch == self.epoch:
            self.records.add(put.key, put.value)
            self.allocations.adopt(put.extents, put.stored_pages)
        elif put.is_named:
            # after a reset, the allocation becomes free once the reset is durable
            put.note_outcome(WriteOutcome.FAILED)
            self._submit(Remove([], [put.extents]))
        else:
            self.allocations.free(put.extents)

    # -- removing ----------------------------------------------------------------------------

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove keys from memory now and from the disk soon."""
        gone: list[Key] = []
        allocations: list[Extents] = []
        for key in keys:
            value = self.records.pop(key)
            if value is not None:
                extents = extents_of(value)
                self.allocations.hold(extents)
                gone.append(key)
                allocations.append(extents)
        self.counts["deleted"] += len(gone)
        if gone:
            self._submit(Remove(gone, allocations))

    async def reset(self, epoch: int) -> None:
        """Delete everything and begin this epoch, or the next one if that is greater. Durable on
        return, unless the commit thread has failed."""
        self.epoch = max(epoch, self.epoch + 1)
        self.records.clear()
        self.filling = {}
        self._touched.clear()
        await settled(self._submit(Clear(self.epoch)))

    def _submit(self, change: Remove | Clear) -> asyncio.Future[None]:
        done = self._removals[change] = self._loop.create_future()
        self.committer.submit([change])
        return done

    def end_removal(self, change: Remove | Clear) -> None:
        """Record that a removal was committed, or that the commit thread has failed."""
        if self.committer.failure is None:
            if isinstance(change, Clear):
                self.allocations.free_present()
            else:
                for extents in change.allocations:
                    self.allocations.free(extents)
        self._removals.pop(change).set_result(None)

    async def wait_for_space(self) -> bool:
        """Wait for a change if allocations will become free. Returns False if none will."""
        if not self._removals and not self.allocations.is_waiting:
            return False
        if self._removals:
            self.committer.hurry()
        await asyncio.wait([self._change])
        return True

    def notify_waiting(self) -> None:
        """Wake the callers of ``wait_for_space``."""
        self._change.set_result(None)
        self._change = self._loop.create_future()

    # -- recency ---------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> None:
        """Record a use of the keys that are present."""
        for key, use in zip(keys, self.uses.take(len(keys)), strict=True):
            if self.records.touch(key, use):
                self._touched.add(key)
        if len(self._touched) >= TOUCHES_MAX:
            self.flush_touches()
        elif self._touched and self._touch_timer is None:
            self._touch_timer = self._loop.call_later(TOUCH_FLUSH_S, self.flush_touches)

    def flush_touches(self) -> None:
        """Pass the noted uses to the next commit."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        records = self.records
        values = [(key, value) for key in self._touched if (value := records.get(key)) is not None]
        self._touched.clear()
        if values:
            self.committer.submit([Refresh(values)])

    def check(self) -> None:
        """Raise ``AssertionError`` if records and allocations disagree. For tests."""
        self.records.check()
        self.allocations.check([extents_of(value) for _, value in self.records.items()])

"""Writes of an LMDB tier: allocate, write in I/O threads, commit.

The event loop's thread owns this; the file grows in a separate thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tiers.base import Buffer, Key, WriteOutcome
from tiers.io.direct_io import pages_for
from tiers.io.threads import Call, IoThreads, in_thread, settled
from tiers.lmdb.contents import LmdbContents
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.io_jobs import Put, WriteJob, job_bytes
from tiers.lmdb.options import LmdbOptions

_COUNTERS = ("written", "write_full", "write_failed", "written_bytes", "grow_failures")


class LmdbWrites:
    """``counts`` are the counters of writes. ``fail`` receives records that will not be committed;
    any thread may call it."""

    def __init__(
        self,
        files: LmdbFiles,
        contents: LmdbContents,
        options: LmdbOptions,
        threads: IoThreads,
        fail: Callable[[Sequence[Put]], None],
    ) -> None:
        self._files = files
        self._contents = contents
        self._options = options
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self._threads = threads
        self._fail = fail
        self._growing: asyncio.Future[int] | None = None
        self._queued_bytes = 0

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """See ``Tier.write``."""
        filling = self._contents.filling
        if filling and len(filling) + len(keys) > self._options.queue_records:
            self.counts["write_failed"] += len(keys)
            return [WriteOutcome.FAILED] * len(keys)
        size = sum(data.nbytes for data in buffers)
        self._queued_bytes += size
        try:
            return await self._write(keys, buffers)
        finally:
            self._queued_bytes -= size

    async def _write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        call = Call(WriteOutcome.FAILED, len(keys))
        batch = _PutBatch(self, job_bytes(self._options, self._queued_bytes))
        try:
            for position, (key, data) in enumerate(zip(keys, buffers, strict=True)):
                if not self._begin(batch, call, position, key, data):
                    await self._begin_later(batch, call, position, key, data)
        finally:
            # Even when cancelled, write the records that have an allocation and wait for them.
            batch.submit()
            call.begun()
            await settled(call.done)
        return call.outcomes

    def _begin(self, batch: _PutBatch, call: Call, position: int, key: Key, data: Buffer) -> bool:
        """Allocate pages for one record and add it to the batch. Returns False if the epoch is
        over, the record is known, or no pages are free now."""
        records_max = self._files.records_max
        put = self._contents.begin_write(key, data.nbytes, batch.epoch, records_max)
        if put is None:
            return False
        call.expect(put.waiters, position)
        batch.add(put, data)
        return True

    async def _begin_later(
        self, batch: _PutBatch, call: Call, position: int, key: Key, data: Buffer
    ) -> None:
        """Wait for free pages and add the record to the batch, or settle it here."""
        contents = self._contents
        while batch.epoch == contents.epoch:
            if key in contents.filling or key in contents.records:
                break
            batch.submit()  # records added so far must not wait for this one
            if not await self._make_space(pages_for(data.nbytes)):
                break
            if self._begin(batch, call, position, key, data):
                return
        if batch.epoch != contents.epoch:
            self.counts["write_failed"] += 1
        elif key in contents.filling:
            call.expect(contents.filling[key].waiters, position)
        elif key in contents.records:
            call.answer(position, WriteOutcome.OK)
        else:
            self.counts["write_full"] += 1
            call.answer(position, WriteOutcome.FULL)

    async def _make_space(self, pages: int) -> bool:
        """Grow the file, or wait for allocations that will become free. Returns False if it can do
        neither."""
        contents, files = self._contents, self._files
        if contents.committer.failure is not None:
            return False
        has_space = contents.count() < files.records_max
        if has_space and contents.allocations.pages < files.pages_max and await self._grow(pages):
            return True
        return await contents.wait_for_space()

    async def _grow(self, pages: int) -> bool:
        if self._growing is None:
            self._growing = in_thread(self._grow_file, pages)
            self._growing.add_done_callback(self._on_grown)
        growing = self._growing
        await asyncio.wait([growing])
        return growing.result() > 0

    def _grow_file(self, pages: int) -> int:
        try:
            return self._files.grow(pages)
        except OSError:
            return 0

    def _on_grown(self, growing: asyncio.Future[int]) -> None:
        self._growing = None
        gain = growing.result()
        if gain:
            self._contents.allocations.extend(gain)
        else:
            self.counts["grow_failures"] += 1

    async def wait_for(self, keys: Sequence[Key]) -> None:
        """Wait until pending writes of these keys have ended."""
        filling = self._contents.filling
        found = [put for key in keys if (put := filling.get(key)) is not None]
        if found:
            call = Call(WriteOutcome.FAILED, len(found))
            for position, put in enumerate(found):
                call.expect(put.waiters, position)
            call.begun()
            await settled(call.done)

    @property
    def epoch(self) -> int:
        """The epoch under which records are written now."""
        return self._contents.epoch

    def submit(self, puts: list[Put], data: list[Buffer]) -> None:
        """Send records to the I/O threads as one job."""
        uses = list(self._contents.uses.take(len(puts)))
        files, commit = self._files, self._contents.committer.submit
        self._threads.submit(
            WriteJob(puts, data, uses, files.codec, files.file, commit, self._fail)
        )

    def end(self, put: Put) -> None:
        """Settle a write that was committed or has failed."""
        self._contents.end_write(put)
        if put.outcome is WriteOutcome.OK:
            self.counts["written"] += 1
            self.counts["written_bytes"] += put.payload_bytes
        else:
            is_full = put.outcome is WriteOutcome.FULL
            self.counts["write_full" if is_full else "write_failed"] += 1
        Call.settle(put.waiters, put.outcome)


class _PutBatch:
    """Collects the records of one ``write`` into jobs of about ``job_bytes``."""

    def __init__(self, writes: LmdbWrites, size_max: int) -> None:
        self.epoch = writes.epoch
        self._writes = writes
        self._size_max = size_max
        self._puts: list[Put] = []
        self._data: list[Buffer] = []
        self._size = 0

    def add(self, put: Put, data: Buffer) -> None:
        self._puts.append(put)
        self._data.append(data)
        self._size += data.nbytes
        if self._size >= self._size_max:
            self.submit()

    def submit(self) -> None:
        if self._puts:
            self._writes.submit(self._puts, self._data)
            self._puts, self._data, self._size = [], [], 0

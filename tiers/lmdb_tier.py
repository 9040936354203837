"""The disk tier: LMDB keeps the index, a preallocated file beside it the payloads.

A write goes: place in the payload file -> I/O thread (tag, O_DIRECT write) -> commit thread
(flush of the payload file, then one LMDB transaction for all that arrived) -> present.
A read goes: lookup in memory -> I/O thread (O_DIRECT read into the caller's buffer, tag) -> done.

A place is free again only when the transaction that forgot its record is durable and no read is
under way in it. ``capacity_bytes`` covers the whole folder: payloads, index and page 0.
Recency is written with the next commit, at the latest after ``TOUCH_FLUSH_S``.

Epochs only grow: ``reset(e)`` begins epoch ``max(e, current + 1)``, so every reset forgets, also
one whose number was used before a restart.

Ownership: everything in this class belongs to the event loop's thread. Jobs and changes go out
through queues and come back by ``call_soon_threadsafe``; an open tier belongs to one loop and
one process (using it after a fork is a ``TierIoError``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
)
from tiers.calls import Call, settled
from tiers.commit_thread import Change, Clear, CommitThread, Put, Refresh, Remove
from tiers.daemon_threads import in_thread
from tiers.direct_io import DiskIo, pages_for
from tiers.extents import Runs
from tiers.io_threads import IoThreads, Together
from tiers.lmdb_index import payload_bytes_of, runs_of
from tiers.lmdb_store import LmdbOptions, LmdbStore
from tiers.places import Places
from tiers.record import Identity, check_identity, check_key, check_payload
from tiers.transfer import ReadItem, ReadJob, WriteJob
from tiers.uses import UseClock

TOUCH_FLUSH_S = 5.0
TOUCHES_MAX = 4096
JOB_BYTES_MIN = 256 << 10
SPARE_THREADS = 2
"""Threads beyond the queue depth: while some verify or seal, the device has its requests."""
_COUNTERS = (
    *("written", "write_full", "write_failed", "read_ok", "read_miss", "read_corrupt"),
    *("read_busy", "deleted", "written_bytes", "read_bytes", "io_errors", "grow_failures"),
)

T = TypeVar("T")


class LmdbTier(Tier):
    """See the module. ``path`` is this rank's own folder."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        options: LmdbOptions | None = None,
        io: DiskIo | None = None,
        **changes: Any,
    ) -> None:
        """``changes`` are fields of ``LmdbOptions`` by name. Raises ``ValueError`` (or
        ``TypeError`` for an unknown name)."""
        self._folder = Path(path)
        self._capacity_bytes = capacity_bytes
        self._options = replace(options or LmdbOptions(), **changes)
        check_identity(Identity(self._options.namespace, self._options.rank))
        self._io = io or DiskIo()
        self._store: LmdbStore | None = None
        self._closing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {}

    # -- opening and closing ---------------------------------------------------------------

    async def open(self) -> TierInfo:
        if self._store is not None:
            raise TierIoError(f"the tier in {self._folder} is open already")
        arguments = (self._folder, self._capacity_bytes, self._options, self._io)
        opening = in_thread(LmdbStore, *arguments)
        try:
            store = await settled(opening)
        except asyncio.CancelledError:
            if opening.exception() is None:
                opening.result().close()
            raise
        self._begin(store)
        capacity_bytes, count = (store.pages_max - 1) * ALIGNMENT, len(self._records)
        medium, epochs = store.index.manifest.file_id, (self._epoch, store.found_epoch)
        return TierInfo("lmdb", capacity_bytes, self.used_bytes, count, True, medium, *epochs)

    def _begin(self, store: LmdbStore) -> None:
        recovered = store.recovered
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._epoch = store.index.epoch
        self._records = recovered.records
        self._uses = UseClock(recovered.next_use)
        self._places = Places(store.file_pages, recovered.free)
        self._filling: dict[Key, Put] = {}
        self._commits: dict[Remove | Clear, asyncio.Future[None]] = {}
        self._space = self._loop.create_future()
        self._growing: asyncio.Future[int] | None = None
        self._touched: set[Key] = set()
        self._touch_timer: asyncio.TimerHandle | None = None
        self._reads_queued = self._active = 0
        self._idle: asyncio.Future[None] | None = None
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._counts["dropped_at_open"] = len(recovered.bad)
        self._counts["quarantined"] = int(store.quarantined is not None)
        threads = self._options.io_threads + SPARE_THREADS
        self._read_threads = IoThreads("tier-read", threads)
        self._write_threads = IoThreads("tier-write", threads)
        committed = self._from_thread(self._on_commit)
        self._committer = CommitThread(store.index, store.file, self._write_threads.busy, committed)
        self._closing = None
        self._store = store

    def _from_thread(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """``function`` as other threads may call it; lost if the loop is gone."""

        def post(value: T) -> None:
            try:
                self._loop.call_soon_threadsafe(function, value)
            except RuntimeError:
                # The loop was closed over an open tier: nobody is left to tell.
                return

        return post

    async def aclose(self) -> None:
        if self._store is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._store))
        await settled(self._closing)

    async def _close(self, store: LmdbStore) -> None:
        timeout_s = self._options.close_timeout_s
        if self._active:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=timeout_s)
        self._flush_touches()
        threads = (self._read_threads, self._write_threads, self._committer)
        closing = in_thread(store.close, *threads)
        await asyncio.wait([closing], timeout=timeout_s)
        self._store = None
        if closing.done():  # else hung threads use the files, which are closed when they end
            closing.result()

    def _open_store(self) -> LmdbStore:
        if self._store is None or self._closing is not None:
            raise TierClosedError(f"the tier in {self._folder} is not open")
        if os.getpid() != self._pid:
            raise TierIoError(
                f"the tier in {self._folder} was opened by process {self._pid} and cannot be used "
                f"in process {os.getpid()}. Open it after the fork"
            )
        self._check_index()
        return self._store

    def _check_index(self) -> None:
        failure = self._committer.failure
        if failure is not None:
            raise TierIoError(
                f"the index in {self._folder} cannot be written any more: {failure!r}. "
                "Close the tier and open it again"
            ) from failure

    @contextmanager
    def _working(self) -> Iterator[LmdbStore]:
        """Around every public call: checks, and lets ``aclose`` wait for those inside."""
        store = self._open_store()
        self._active += 1
        try:
            yield store
        finally:
            self._active -= 1
            if not self._active and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    # -- what it says of itself ------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under which records are written and read now."""
        return self._epoch

    @property
    def used_bytes(self) -> int:
        """Bytes of places that are not free, those on their way in or out included."""
        return self._places.used_pages * ALIGNMENT

    def footprint_bytes(self, payload_bytes: int) -> int:
        return pages_for(payload_bytes) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._open_store()
        for batch in self._records.by_use():
            yield batch

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = dict(self._counts)
        store = self._store
        if store is not None:
            counts["records"] = len(self._records)
            counts["used_bytes"] = self.used_bytes
            counts["file_bytes"] = store.file_pages * ALIGNMENT
            counts["epoch"] = self._epoch
            counts["direct_io"] = int(store.file.direct)
            counts["commits"] = self._committer.counters.commits
            counts["sync_failures"] = self._committer.counters.sync_failures
        return counts

    def check(self) -> None:
        """Raise ``AssertionError`` if the parts of this tier disagree. For tests."""
        self._records.check()
        self._places.check([runs_of(value) for _, value in self._records.items()])

    # -- writing ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working() as store:
            for key, data in zip(keys, buffers, strict=True):
                check_key(key)
                check_payload(data.nbytes)
            if self._filling and len(self._filling) + len(keys) > self._options.queue_records:
                self._counts["write_failed"] += len(keys)
                return [WriteOutcome.FAILED] * len(keys)
            call = Call([WriteOutcome.FAILED] * len(keys))
            batch = _Batch(self, sum(data.nbytes for data in buffers))
            try:
                for position, (key, data) in enumerate(zip(keys, buffers, strict=True)):
                    await self._begin_write(store, batch, call, position, key, data)
            finally:
                # Also when cancelled: what has a place goes on its way, and is waited for.
                batch.submit()
                call.begun()
                await settled(call.done)
            return call.outcomes

    async def _begin_write(
        self, store: LmdbStore, batch: _Batch, call: Call, position: int, key: Key, data: Buffer
    ) -> None:
        """Give one record a place and add it to the batch, or settle it here."""
        runs: Runs | None = None
        while batch.epoch == self._epoch and key not in self._records and key not in self._filling:
            if len(self._records) + len(self._filling) < store.records_max:
                runs = self._places.allocate(pages_for(data.nbytes))
            if runs is not None:
                break
            batch.submit()  # what was added so far must not wait with this one
            if not await self._make_space(store, pages_for(data.nbytes)):
                break
        if runs is not None:
            put = Put(key, b"", batch.epoch, data.nbytes, runs)
            self._filling[key] = put
            call.expect(put.waiters, position)
            batch.add(put, data)
        elif batch.epoch != self._epoch:
            self._counts["write_failed"] += 1
        elif key in self._filling:
            call.expect(self._filling[key].waiters, position)
        elif key in self._records:
            call.outcomes[position] = WriteOutcome.OK
        else:
            self._counts["write_full"] += 1
            call.outcomes[position] = WriteOutcome.FULL

    async def _make_space(self, store: LmdbStore, pages: int) -> bool:
        """Grow the file, or wait for places on their way to be free. ``False``: neither."""
        if self._committer.failure is not None:
            return False
        has_room = len(self._records) + len(self._filling) < store.records_max
        if has_room and self._places.pages < store.pages_max and await self._grow(store, pages):
            return True
        if not self._commits and not self._places.is_waiting:
            return False
        if self._commits:
            self._committer.hurry()
        await asyncio.wait([self._space])
        return True

    async def _grow(self, store: LmdbStore, pages: int) -> bool:
        if self._growing is None:
            self._growing = in_thread(self._grow_file, store, pages)
            self._growing.add_done_callback(self._on_grown)
        growing = self._growing
        await asyncio.wait([growing])
        return growing.result() > 0

    @staticmethod
    def _grow_file(store: LmdbStore, pages: int) -> int:
        try:
            return store.grow(pages)
        except OSError:
            return 0

    def _on_grown(self, growing: asyncio.Future[int]) -> None:
        self._growing = None
        gain = growing.result()
        if gain:
            self._places.extend(gain)
        else:
            self._counts["grow_failures"] += 1

    def _submit_write(self, puts: list[Put], data: list[Buffer]) -> None:
        store = self._store
        assert store is not None, "aclose waits for every call"
        uses = list(self._uses.take(len(puts)))
        self._write_threads.submit(
            WriteJob(
                puts,
                data,
                uses,
                store.codec,
                store.file,
                self._committer.submit,
                self._from_thread(self._on_commit),
            )
        )

    def _on_commit(self, batch: Sequence[Change]) -> None:
        """A batch was committed, or failed as a whole, or (puts only) never got so far."""
        for change in batch:
            if isinstance(change, Put):
                self._end_write(change)
            elif isinstance(change, Remove | Clear):
                self._end_removal(change)
        self._wake_waiting()

    def _end_write(self, put: Put) -> None:
        if self._filling.get(put.key) is put:
            del self._filling[put.key]
        if put.outcome is WriteOutcome.OK and put.epoch == self._epoch:
            self._records.add(put.key, put.value)
            self._places.adopt(put.runs, put.stored_pages)
            self._counts["written"] += 1
            self._counts["written_bytes"] += put.payload_bytes
        elif put.is_named:  # a reset overtook it: its place is free when that is durable
            put.outcome = WriteOutcome.FAILED
            self._submit_removal(Remove([], [put.runs]))
        else:
            self._places.freed(put.runs)
        if put.outcome is not WriteOutcome.OK:
            is_full = put.outcome is WriteOutcome.FULL
            self._counts["write_full" if is_full else "write_failed"] += 1
        Call.settle(put.waiters, put.outcome)

    def _end_removal(self, change: Remove | Clear) -> None:
        if self._committer.failure is None:
            if isinstance(change, Clear):
                self._places.cleared()
            else:
                for runs in change.places:
                    self._places.freed(runs)
        self._commits.pop(change).set_result(None)

    def _wake_waiting(self) -> None:
        self._space.set_result(None)
        self._space = self._loop.create_future()

    # -- reading ---------------------------------------------------------------------------

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working() as store:
            if self._reads_queued and self._reads_queued + len(keys) > self._options.queue_records:
                self._counts["read_busy"] += len(keys)
                return [ReadOutcome.BUSY] * len(keys)
            call = Call([ReadOutcome.MISS] * len(keys))
            items = self._find(call, keys, into)
            job_bytes = self._job_bytes(sum(item.into.nbytes for item in items))
            whole = Together(self._from_thread(self._end_reads))
            jobs, tell = whole.jobs, whole.one_ended
            start = size = 0
            for stop, item in enumerate(items, 1):
                self._places.pin(item.runs)
                call.expect(item.waiters, item.position)
                size += item.into.nbytes
                if size >= job_bytes or stop == len(items):
                    part = items[start:stop]
                    jobs.append(ReadJob(part, self._epoch, store.codec, store.file, tell))
                    start, size = stop, 0
            self._reads_queued += len(items)
            for job in jobs:
                self._read_threads.submit(job)
            call.begun()
            await settled(call.done)
            return call.outcomes

    def _find(self, call: Call, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadItem]:
        """What is present, in the order of places; the rest is settled here."""
        items = []
        for position, (key, data) in enumerate(zip(keys, into, strict=True)):
            value = self._records.get(key)
            if value is None:
                self._counts["read_miss"] += 1
            elif payload_bytes_of(value) != data.nbytes:
                self._counts["read_corrupt"] += 1
                call.outcomes[position] = ReadOutcome.CORRUPT
            else:
                items.append(ReadItem(key, value, runs_of(value), data, position))
        items.sort(key=lambda item: item.runs[0].start)
        return items

    def _job_bytes(self, total_bytes: int) -> int:
        """How much goes into one job: all threads get some, small records go together."""
        share = total_bytes // self._options.io_threads
        return min(self._options.job_bytes, max(JOB_BYTES_MIN, share))

    def _end_reads(self, whole: Together) -> None:
        for job in whole.jobs:
            self._end_read(job)
        self._wake_waiting()

    def _end_read(self, job: ReadJob) -> None:
        self._reads_queued -= len(job.items)
        self._counts["io_errors"] += job.io_errors
        damaged = []
        for item in job.items:
            self._places.unpin(item.runs)
            if job.epoch != self._epoch:
                item.outcome = ReadOutcome.MISS
            elif item.outcome is ReadOutcome.CORRUPT and self._records.get(item.key) == item.value:
                damaged.append(item.key)
            self._counts[f"read_{item.outcome.value}"] += 1
            if item.outcome is ReadOutcome.OK:
                self._counts["read_bytes"] += item.into.nbytes
            Call.settle(item.waiters, item.outcome)
        self._forget(damaged)  # so that a good copy can be written again

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._working():
            filling = [put for key in keys if (put := self._filling.get(key)) is not None]
            if filling:
                call = Call([WriteOutcome.FAILED] * len(filling))
                for position, put in enumerate(filling):
                    call.expect(put.waiters, position)
                call.begun()
                await settled(call.done)
            self._forget(keys)

    def _forget(self, keys: Sequence[Key]) -> None:
        """Take keys out of memory now and off the disk soon."""
        gone: list[Key] = []
        places: list[Runs] = []
        for key in keys:
            value = self._records.pop(key)
            if value is not None:
                runs = runs_of(value)
                self._places.forget(runs)
                gone.append(key)
                places.append(runs)
        self._counts["deleted"] += len(gone)
        if gone:
            self._submit_removal(Remove(gone, places))

    def _submit_removal(self, change: Remove | Clear) -> asyncio.Future[None]:
        done = self._commits[change] = self._loop.create_future()
        self._committer.submit([change])
        return done

    async def touch(self, keys: Sequence[Key]) -> None:
        self._open_store()
        for key, use in zip(keys, self._uses.take(len(keys)), strict=True):
            if self._records.touch(key, use):
                self._touched.add(key)
        if len(self._touched) >= TOUCHES_MAX:
            self._flush_touches()
        elif self._touched and self._touch_timer is None:
            self._touch_timer = self._loop.call_later(TOUCH_FLUSH_S, self._flush_touches)

    def _flush_touches(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        records = self._records
        values = [(key, value) for key in self._touched if (value := records.get(key)) is not None]
        self._touched.clear()
        if values:
            self._committer.submit([Refresh(values)])

    async def reset(self, epoch: int) -> None:
        with self._working():
            self._epoch = max(epoch, self._epoch + 1)
            self._records.clear()
            self._filling = {}
            self._touched.clear()
            await settled(self._submit_removal(Clear(self._epoch)))
            self._check_index()


class _Batch:
    """Records of one ``write`` on their way into jobs of about ``job_bytes``."""

    def __init__(self, tier: LmdbTier, total_bytes: int) -> None:
        self.epoch = tier.epoch
        self._tier = tier
        self._job_bytes = tier._job_bytes(total_bytes)
        self._puts: list[Put] = []
        self._data: list[Buffer] = []
        self._size = 0

    def add(self, put: Put, data: Buffer) -> None:
        self._puts.append(put)
        self._data.append(data)
        self._size += data.nbytes
        if self._size >= self._job_bytes:
            self.submit()

    def submit(self) -> None:
        if self._puts:
            self._tier._submit_write(self._puts, self._data)
            self._puts, self._data, self._size = [], [], 0

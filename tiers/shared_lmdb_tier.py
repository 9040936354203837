"""The LMDB tier for several processes of one machine over one folder, under one cap.

What an exclusive tier keeps in memory (which records there are, where they lie, what is free, the
order of use) is in the index here, and each of its changes is a transaction that all of them see:

    write   reserve places -> I/O threads write -> flush, publish -> present for everybody
    read    I/O threads look the keys up, read, verify, and look again if that fails

A tier that shares evicts by itself: no scheduler knows what the others use. Whoever finds no room
first takes back what killed processes had reserved, then lets the file grow, and then forgets the
least recently used records of all until ``low_watermark`` of the capacity is in use. Times of use
are noted within ``TOUCH_FLUSH_S``, those of reads only if the last is older than ``READ_USE_S``.

``reset`` says that this process has other weights from now on: it goes on under an epoch of its
own, and nothing of before exists for anybody. Others go on under a new common epoch.

Ownership: as in ``lmdb_tier``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from tiers.commit_thread import Change, Put
from tiers.daemon_threads import DaemonThreads, in_thread
from tiers.direct_io import DiskIo, pages_for
from tiers.extents import Runs
from tiers.io_threads import IoThreads
from tiers.lmdb_store import LmdbOptions
from tiers.record import Identity, check_identity, check_key, check_payload
from tiers.shared_changes import Changes, Reservation
from tiers.shared_commits import Ask, SharedCommits
from tiers.shared_reads import SharedReadJob
from tiers.shared_store import SharedStore
from tiers.transfer import WriteJob

TOUCH_FLUSH_S = 5.0
TOUCHES_MAX = 1024
READ_USE_S = 10.0
KEYS_PER_BATCH = 1 << 14
JOB_BYTES_MIN = 256 << 10
ROOM_ATTEMPTS = 8
"""How often a write makes room that others may take before it does."""
_COUNTERS = (
    *("written", "write_full", "write_failed", "read_ok", "read_miss", "read_corrupt"),
    *("read_busy", "deleted", "written_bytes", "read_bytes", "io_errors"),
)

T = TypeVar("T")


class SharedLmdbTier(Tier):
    """See the module. ``path`` is a folder on a local disk, the same for all who share."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        options: LmdbOptions | None = None,
        io: DiskIo | None = None,
        low_watermark: float = 0.9,
        **changes: Any,
    ) -> None:
        """``changes`` are fields of ``LmdbOptions`` by name. An odd ``epoch`` says that this
        process has weights that are not those of the model's files."""
        self._folder = Path(path)
        self._capacity_bytes = capacity_bytes
        self._options = replace(options or LmdbOptions(), **changes)
        check_identity(Identity(self._options.namespace, self._options.rank))
        self._io = io or DiskIo()
        self._low_watermark = low_watermark
        self._store: SharedStore | None = None
        self._closing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {}

    # -- opening and closing ---------------------------------------------------------------

    async def open(self) -> TierInfo:
        if self._store is not None:
            raise TierIoError(f"the tier in {self._folder} is open already")
        arguments = (self._folder, self._capacity_bytes, self._options, self._io)
        opening = in_thread(SharedStore, *arguments)
        try:
            store = await settled(opening)
        except asyncio.CancelledError:
            if opening.exception() is None:
                opening.result().close()
            raise
        self._begin(store)
        state, medium = await self._lookups.run(lambda: (store.index.state(), store.medium))
        capacity_bytes = (store.pages_max - 1) * ALIGNMENT
        used_bytes = (state.file_pages - 1 - state.free_pages) * ALIGNMENT
        count, epoch = state.records, self._options.epoch
        return TierInfo(
            "lmdb", capacity_bytes, used_bytes, count, True, medium, epoch, epoch, shared=True
        )

    def _begin(self, store: SharedStore) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._own_epoch = store.own_epoch
        self._epochs_begun = self._resets = 0
        self._filling: dict[Key, Put] = {}
        self._touched: dict[Key, None] = {}
        self._touch_timer: asyncio.TimerHandle | None = None
        self._reads_queued = self._active = 0
        self._idle: asyncio.Future[None] | None = None
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._counts["dropped_at_open"] = store.dropped
        self._counts["quarantined"] = int(store.quarantined is not None)
        self._read_threads = IoThreads("tier-read", self._options.io_threads)
        self._write_threads = IoThreads("tier-write", self._options.io_threads)
        self._lookups = DaemonThreads("tier-lookup", 2)
        self._commits = SharedCommits(store.index, store.sharer.number, store.file.sync)
        self._closing = None
        self._store = store

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Have ``function`` called on the loop; from any thread. Lost if the loop is gone."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop was closed over an open tier: nobody is left to tell.
            return

    async def aclose(self) -> None:
        if self._store is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._store))
        await settled(self._closing)

    async def _close(self, store: SharedStore) -> None:
        timeout_s = self._options.close_timeout_s
        if self._active:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=timeout_s)
        self._flush_touches()
        threads = (self._read_threads, self._write_threads, self._lookups, self._commits)
        closing = in_thread(store.close, *threads)
        await asyncio.wait([closing], timeout=timeout_s)
        self._store = None
        if closing.done():  # else hung threads use the files, which are closed when they end
            closing.result()

    def _open_store(self) -> SharedStore:
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
        failure = self._commits.failure
        if failure is not None:
            raise TierIoError(
                f"the index in {self._folder} cannot be written any more: {failure!r}. "
                "Close the tier and open it again"
            ) from failure

    @contextmanager
    def _working(self) -> Iterator[SharedStore]:
        """Around every public call: checks, and lets ``aclose`` wait for those inside."""
        store = self._open_store()
        self._active += 1
        try:
            yield store
        finally:
            self._active -= 1
            if not self._active and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    # -- transactions ----------------------------------------------------------------------

    def _ask(
        self, change: Callable[[Changes], T], flushes: bool = False
    ) -> asyncio.Future[T | None]:
        """Have it done in a transaction; ``None`` if it could not be."""
        done: asyncio.Future[T | None] = self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not done.done():
                done.set_result(result if error is None else None)

        self._commits.submit(Ask(change, lambda *found: self._post(settle, *found), flushes))
        return done

    async def _lookup(self, function: Callable[..., T], *arguments: object) -> T:
        """A short look at the index. Raises ``TierIoError``."""
        try:
            return await settled(self._lookups.run(function, *arguments))
        except Exception as error:  # whatever LMDB raises, nothing can be found there
            raise TierIoError(f"the index in {self._folder} cannot be read: {error!r}") from error

    # -- what it says of itself ------------------------------------------------------------

    def footprint_bytes(self, payload_bytes: int) -> int:
        return pages_for(payload_bytes) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        store = self._open_store()
        await self._noted()
        keys, sizes = await self._lookup(store.index.by_use, self._own_epoch)
        for start in range(0, len(keys), KEYS_PER_BATCH):
            stop = start + KEYS_PER_BATCH
            yield StoredKeys(keys[start:stop], sizes[start:stop])

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these can be read now, by this process, whoever stored them."""
        with self._working() as store:
            if self._resets:
                return [False] * len(keys)
            _epoch, values = await self._lookup(store.index.find, keys, self._own_epoch)
            return [value is not None for value in values]

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = dict(self._counts)
        store = self._store
        if store is not None:
            counts["direct_io"] = int(store.file.direct)
            counts["commits"] = self._commits.commits
            counts["sync_failures"] = self._commits.sync_failures
        return counts

    def check(self) -> None:
        """Raise ``AssertionError`` if the tables of the index disagree. For tests."""
        self._open_store().index.check()

    # -- writing ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working() as store:
            for key, data in zip(keys, buffers, strict=True):
                check_key(key)
                check_payload(data.nbytes)
            is_long = len(self._filling) + len(keys) > self._options.queue_records
            if self._resets or (self._filling and is_long):
                self._counts["write_failed"] += len(keys)
                return [WriteOutcome.FAILED] * len(keys)
            call = Call([WriteOutcome.FAILED] * len(keys))
            own: list[tuple[Put, Buffer]] = []
            for position, (key, data) in enumerate(zip(keys, buffers, strict=True)):
                put = self._filling.get(key)
                if put is None:
                    put = self._filling[key] = Put(key, b"", 0, data.nbytes, ())
                    own.append((put, data))
                call.expect(put.waiters, position)
            # A task, so that it goes on to its end also when this call is cancelled.
            filling = asyncio.ensure_future(self._fill(store, own))
            call.begun()
            try:
                await settled(call.done)
            finally:
                await settled(filling)
            return call.outcomes

    async def _fill(self, store: SharedStore, own: list[tuple[Put, Buffer]]) -> None:
        """Give every record a place and send it on its way; settle those that get none."""
        try:
            left = await self._place_all(store, own)
        except Exception:
            self._settle([record for record in own if record[0].waiters], WriteOutcome.FAILED)
            raise
        self._settle(left, WriteOutcome.FULL)

    async def _place_all(
        self, store: SharedStore, own: list[tuple[Put, Buffer]]
    ) -> list[tuple[Put, Buffer]]:
        """Send all on their way that there is or can be made room for; the rest."""
        left, epochs_begun, own_epoch = own, self._epochs_begun, self._own_epoch
        for attempt in range(ROOM_ATTEMPTS):
            if not left:
                break
            if attempt:
                needed = max(pages_for(data.nbytes) for _put, data in left)
                total = sum(pages_for(data.nbytes) for _put, data in left)
                if not await self._make_room(store, needed, total, len(left)):
                    break
            wanted = [(put.key, pages_for(data.nbytes)) for put, data in left]
            found = await self._reserve(store, wanted, own_epoch)
            if found is None:
                self._settle(left, WriteOutcome.FAILED)
                return []
            if epochs_begun != self._epochs_begun:  # a reset overtook it
                places = [runs for runs in found.places if runs is not None]
                await self._ask(partial(Changes.abandon, places=places))
                self._settle(left, WriteOutcome.FAILED)
                return []
            left = self._send(store, left, found, own_epoch)
        return left

    def _reserve(
        self, store: SharedStore, wanted: list[tuple[Key, int]], own_epoch: int | None
    ) -> asyncio.Future[Reservation | None]:
        records_max = store.records_max
        return self._ask(
            lambda changes: changes.reserve(wanted, own_epoch, records_max, store.grow)
        )

    async def _make_room(self, store: SharedStore, needed: int, total: int, records: int) -> bool:
        """Whether there may be room now for records of which the largest needs ``needed`` pages."""
        alive = store.sharer.is_alive
        if await self._ask(lambda changes: changes.roll_back(alive)):
            return True
        pages = store.pages_max - 1
        ahead = pages - int(pages * self._low_watermark)
        free_pages = min(max(total, ahead), pages)
        most = min(store.records_max - records, int(store.records_max * self._low_watermark))
        went = await self._ask(
            lambda changes: (changes.evict(max(free_pages, needed), max(most, 0)), True)
        )
        return went is not None

    def _send(
        self,
        store: SharedStore,
        records: list[tuple[Put, Buffer]],
        found: Reservation,
        own_epoch: int | None,
    ) -> list[tuple[Put, Buffer]]:
        """Hand those that have a place to the I/O threads; the ones that have none."""
        left: list[tuple[Put, Buffer]] = []
        jobs: list[list[tuple[Put, Buffer, int]]] = []
        job_bytes = self._job_bytes(sum(data.nbytes for _put, data in records))
        size = job_bytes
        for n, record in enumerate(records):
            (put, data), runs = record, found.places[n]
            if found.present[n]:
                self._settle([record], WriteOutcome.OK)
            elif runs is None:
                left.append(record)
            else:
                put.runs, put.epoch = runs, found.epoch
                if size >= job_bytes:
                    jobs.append([])
                    size = 0
                jobs[-1].append((put, data, found.uses[n]))
                size += data.nbytes
        for job in jobs:
            self._submit(store, job, own_epoch)
        return left

    def _job_bytes(self, total_bytes: int) -> int:
        """How much goes into one job: all threads get some, small records go together."""
        share = total_bytes // self._options.io_threads
        return min(self._options.job_bytes, max(JOB_BYTES_MIN, share))

    def _submit(
        self, store: SharedStore, job: list[tuple[Put, Buffer, int]], own_epoch: int | None
    ) -> None:
        puts, data, uses = (list(column) for column in zip(*job, strict=True))

        def publish(_puts: Sequence[Change]) -> None:
            def end(_result: None, error: Exception | None) -> None:
                self._post(self._end_write, puts, error)

            self._commits.submit(Ask(lambda c: c.publish(puts, own_epoch), end, flushes=True))

        def fail(_puts: Sequence[Change]) -> None:
            places: list[Runs] = [put.runs for put in puts]
            self._commits.submit(Ask(lambda c: c.abandon(places), lambda _result, _error: None))
            self._post(self._end_write, puts, None)

        self._write_threads.submit(
            WriteJob(puts, data, uses, store.codec, store.file, publish, fail)
        )

    def _end_write(self, puts: list[Put], error: Exception | None) -> None:
        for put in puts:
            if error is not None:
                put.outcome = WriteOutcome.FAILED
            self._settle([(put, None)], put.outcome)

    def _settle(self, records: Sequence[tuple[Put, Buffer | None]], outcome: WriteOutcome) -> None:
        """These records have ended: count them and tell whoever waits."""
        names = {WriteOutcome.OK: "written", WriteOutcome.FULL: "write_full"}
        for put, _data in records:
            if self._filling.get(put.key) is put:
                del self._filling[put.key]
            self._counts[names.get(outcome, "write_failed")] += 1
            if outcome is WriteOutcome.OK and put.runs:
                self._counts["written_bytes"] += put.payload_bytes
            Call.settle(put.waiters, outcome)

    # -- reading ---------------------------------------------------------------------------

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working() as store:
            if self._reads_queued and self._reads_queued + len(keys) > self._options.queue_records:
                self._counts["read_busy"] += len(keys)
                return [ReadOutcome.BUSY] * len(keys)
            if self._resets:
                return [ReadOutcome.MISS] * len(keys)
            epochs_begun = self._epochs_begun
            jobs = self._read_jobs(store, keys, into)
            outcomes = [ReadOutcome.MISS] * len(keys)
            self._reads_queued += len(keys)
            try:
                ended = [self._run(job) for job in jobs]
                if ended:
                    await settled(asyncio.ensure_future(asyncio.wait(ended)))
            finally:
                self._reads_queued -= len(keys)
            for job in jobs:
                self._end_read(job, outcomes)
            if epochs_begun != self._epochs_begun:
                outcomes = [ReadOutcome.MISS] * len(keys)
            for outcome in outcomes:
                self._counts[f"read_{outcome.value}"] += 1
            return outcomes

    def _read_jobs(
        self, store: SharedStore, keys: Sequence[Key], into: Sequence[Buffer]
    ) -> list[SharedReadJob]:
        job_bytes = self._job_bytes(sum(data.nbytes for data in into))
        jobs: list[SharedReadJob] = []
        size = job_bytes
        for position, (key, data) in enumerate(zip(keys, into, strict=True)):
            if size >= job_bytes:
                rest = (self._own_epoch, store.index, store.codec, store.file)
                jobs.append(SharedReadJob([], [], [], *rest, done=lambda: None))
                size = 0
            jobs[-1].keys.append(key)
            jobs[-1].into.append(data)
            jobs[-1].positions.append(position)
            size += data.nbytes
        return jobs

    def _run(self, job: SharedReadJob) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        job.done = lambda: self._post(done.set_result, None)
        self._read_threads.submit(job)
        return done

    def _end_read(self, job: SharedReadJob, outcomes: list[ReadOutcome]) -> None:
        if job.failure is not None:
            raise TierIoError(
                f"the index in {self._folder} cannot be read: {job.failure!r}"
            ) from job.failure
        self._counts["io_errors"] += job.io_errors
        fresh_ns = time.time_ns() - int(READ_USE_S * 1e9)
        for n, outcome in enumerate(job.outcomes):
            outcomes[job.positions[n]] = outcome
            if outcome is ReadOutcome.OK:
                self._counts["read_bytes"] += job.into[n].nbytes
                if job.uses[n] < fresh_ns:
                    self._note_use(job.keys[n])
        if job.damaged:  # so that a good copy can be written again
            self._ask(lambda changes: changes.remove_damaged(job.damaged))

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
            own_epoch = self._own_epoch
            gone = await settled(self._ask(lambda changes: changes.remove(keys, own_epoch)))
            self._counts["deleted"] += gone or 0
            self._check_index()

    async def touch(self, keys: Sequence[Key]) -> None:
        self._open_store()
        for key in keys:
            self._note_use(key)

    def _note_use(self, key: Key) -> None:
        self._touched.pop(key, None)
        self._touched[key] = None
        if len(self._touched) >= TOUCHES_MAX:
            self._flush_touches()
        elif self._touch_timer is None:
            self._touch_timer = self._loop.call_later(TOUCH_FLUSH_S, self._flush_touches)

    def _flush_touches(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        keys, self._touched = list(self._touched), {}
        if keys:
            self._ask(lambda changes: changes.refresh(keys))

    async def _noted(self) -> None:
        """Wait until what was asked for so far is in the index."""
        self._flush_touches()
        await settled(self._ask(lambda changes: None))

    async def reset(self, epoch: int) -> None:
        with self._working():
            before = self._own_epoch
            self._epochs_begun += 1
            self._filling = {}  # they end by themselves, as failures: their epoch is over
            self._resets += 1  # until it is done nothing is stored or found
            begun = await settled(self._ask(lambda changes: changes.begin_epoch(epoch, before)))
            self._check_index()
            if begun is None:
                raise TierIoError(f"an epoch cannot be begun in {self._folder}")
            self._own_epoch = begun
            self._resets -= 1

"""The LMDB tier that several processes of one machine share: one folder, one capacity.

The index contains everything that an exclusive tier keeps in memory (its records, their extents,
free space, the order of use), and every change is a transaction that all processes see:

    write   reserve extents -> I/O threads write -> flush, publish -> present for all processes
    read    I/O threads look the keys up, read, verify, and look again if that fails

A shared tier evicts by itself, because no planner knows which records the other engines use. A
write that finds no space first reclaims extents that killed processes had reserved, then lets the
file grow, and then evicts the least recently used records, whichever engines wrote them, until
``low_watermark`` of the capacity is in use. Uses are recorded within ``TOUCH_FLUSH_S``; a read is
recorded only if the last use is older than ``READ_USE_S``.

``reset`` means that this process has other weights from now on: it continues under a new epoch that
no other process uses. If it used the common epoch until then, the other processes continue under a
new common epoch, and no process can read the earlier records.

Ownership: as in ``lmdb.tier``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    TierInfo,
    TierIoError,
    WriteOutcome,
)
from tiers.folders.folder_tier import FolderTier, Stoppable
from tiers.io.direct_io import DiskIo, pages_for
from tiers.io.resets import Resets
from tiers.io.threads import DaemonThreads, IoThreads, settled
from tiers.lmdb.io_jobs import job_bytes
from tiers.lmdb.options import TOUCH_FLUSH_S, LmdbOptions
from tiers.lmdb.shared.commit_thread import CommitClient, SharedCommitThread
from tiers.lmdb.shared.files import SharedLmdbFiles
from tiers.lmdb.shared.reads import SharedReadJob
from tiers.lmdb.shared.writes import SharedWrites
from tiers.record import Identity, check_identity, check_records

SHARED_TOUCHES_MAX = 1024
READ_USE_S = 10.0
_COUNTERS = (
    *("read_ok", "read_miss", "read_corrupt", "read_busy", "read_bytes", "io_errors"),
    *("deleted",),
)

T = TypeVar("T")


class SharedLmdbTier(FolderTier[SharedLmdbFiles], SharedTier):
    """An LMDB tier that several processes of one machine share. ``path`` is a folder on a local
    disk, the same for all sharers."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        options: LmdbOptions | None = None,
        io: DiskIo | None = None,
        low_watermark: float = 0.9,
        noted_epoch: int = 0,
        **changes: Any,
    ) -> None:
        """``changes`` are fields of ``LmdbOptions`` by name. An odd ``epoch`` means that this
        process has weights other than those of the model's files. ``noted_epoch`` is the last one
        that a process which did not share the folder has begun; records of earlier epochs are
        dropped, because that process may have ended before it dropped them."""
        changed = replace(options or LmdbOptions(), **changes)
        super().__init__(Path(path), changed.close_timeout_s)
        self._options = changed
        self._capacity_bytes = capacity_bytes
        check_identity(Identity(changed.namespace, changed.rank))
        self._io = io or DiskIo()
        self._low_watermark = low_watermark
        self._noted_epoch = noted_epoch
        self._write_counts: dict[str, int] = {}

    # -- opening and closing ---------------------------------------------------------------

    async def open(self) -> TierInfo:
        settings = (self._capacity_bytes, self._options, self._io, self._noted_epoch)
        arguments = (self._folder, *settings)
        files = await self._open_in_thread(SharedLmdbFiles, *arguments)
        try:
            state, medium = await self._lookup(lambda: (files.index.state(), files.medium))
        except BaseException:  # a cancelled open closes the files, too
            await self.aclose()
            raise
        capacity_bytes = (files.pages_max - 1) * ALIGNMENT
        used_bytes = (state.file_pages - 1 - state.free_pages) * ALIGNMENT
        count, epoch = state.records, self._options.epoch
        return TierInfo("lmdb", capacity_bytes, used_bytes, count, True, medium, epoch, epoch)

    def _begin(self, files: SharedLmdbFiles, undo: ExitStack) -> None:
        self._loop = asyncio.get_running_loop()
        self._own_epoch = files.own_epoch
        self._resets = Resets()
        self._touched: dict[Key, None] = {}
        self._touch_timer: asyncio.TimerHandle | None = None
        self._reads_queued = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._counts["dropped_at_open"] = files.dropped
        self._counts["quarantined"] = int(files.was_quarantined)
        self._read_threads = IoThreads("tier-read", self._options.io_threads)
        undo.callback(self._read_threads.stop)
        self._lookups = DaemonThreads("tier-lookup", 2)
        undo.callback(self._lookups.stop)
        self._committer = SharedCommitThread(files.index, files.member.number, files.file.sync)
        undo.callback(self._committer.stop)
        self._client = CommitClient(self._committer)
        self._writes = SharedWrites(files, self._client, self._options, self._low_watermark)
        self._write_counts = self._writes.counts

    def _index_failure(self) -> Exception | None:
        return self._committer.failure

    async def _end_work(self) -> None:
        self._flush_touches()

    def _threads_in_use(self) -> Sequence[Stoppable]:
        return (self._read_threads, self._writes.threads, self._lookups, self._committer)

    async def _lookup(self, function: Callable[..., T], *arguments: object) -> T:
        """Look something up in the index. Raises ``TierIoError``."""
        try:
            return await settled(self._lookups.run(function, *arguments))
        except Exception as error:  # after any error of LMDB, no lookup is possible
            raise TierIoError(f"the index in {self._folder} cannot be read: {error!r}") from error

    # -- information about the tier -----------------------------------------------------------

    def footprint_bytes(self, payload_bytes: int) -> int:
        return pages_for(payload_bytes) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        files = self._open_files()
        await self._noted()
        for batch in await self._lookup(files.index.by_use, self._own_epoch):
            yield batch

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Return which keys this process can read now, regardless of which process stored them."""
        with self._working() as files:
            if self._resets.is_open:
                return [False] * len(keys)
            _epoch, values = await self._lookup(files.index.find, keys, self._own_epoch)
            return [value is not None for value in values]

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = self._counts | self._write_counts
        files = self._files
        if files is not None:
            counts["direct_io"] = int(files.file.direct)
            counts["commits"] = self._committer.commits
            counts["sync_failures"] = self._committer.sync_failures
        return counts

    def check(self) -> None:
        """Raise ``AssertionError`` if the tables of the index disagree. For tests."""
        self._open_files().index.check()

    # -- writing ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working():
            check_records(keys, buffers)
            if self._resets.is_open:
                return [WriteOutcome.FAILED] * len(keys)
            return await self._writes.write(keys, buffers, self._own_epoch)

    # -- reading ---------------------------------------------------------------------------

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working() as files:
            if self._reads_queued and self._reads_queued + len(keys) > self._options.queue_records:
                self._counts["read_busy"] += len(keys)
                return [ReadOutcome.BUSY] * len(keys)
            if self._resets.is_open:
                return [ReadOutcome.MISS] * len(keys)
            resets = self._resets.begun
            jobs = self._read_jobs(files, keys, into)
            outcomes = [ReadOutcome.MISS] * len(keys)
            self._reads_queued += len(keys)
            try:
                for job in jobs:
                    self._read_threads.submit(job)
                # no task: a loop that ends would cancel it, and the jobs use the caller's buffers
                await settled(asyncio.gather(*(job.ended for job in jobs)))
            finally:
                self._reads_queued -= len(keys)
            for job in jobs:
                self._end_read(job, outcomes)
            if resets != self._resets.begun:
                outcomes = [ReadOutcome.MISS] * len(keys)
            for outcome in outcomes:
                self._counts[f"read_{outcome.value}"] += 1
            return outcomes

    def _read_jobs(
        self, files: SharedLmdbFiles, keys: Sequence[Key], into: Sequence[Buffer]
    ) -> list[SharedReadJob]:
        size_max = job_bytes(self._options, sum(data.nbytes for data in into))
        rest = (self._own_epoch, files.index, files.codec, files.file)
        post = self._client.post
        jobs: list[SharedReadJob] = []
        start = size = 0
        for stop, (_key, data) in enumerate(zip(keys, into, strict=True), 1):
            size += data.nbytes
            if size >= size_max or stop == len(into):
                part = (keys[start:stop], into[start:stop], start, *rest)
                jobs.append(SharedReadJob(*part, self._loop.create_future(), post))
                start, size = stop, 0
        return jobs

    def _end_read(self, job: SharedReadJob, outcomes: list[ReadOutcome]) -> None:
        if job.failure is not None:
            raise TierIoError(
                f"the index in {self._folder} cannot be read: {job.failure!r}"
            ) from job.failure
        self._counts["io_errors"] += job.io_errors
        fresh_ns = time.time_ns() - int(READ_USE_S * 1e9)
        for n, outcome in enumerate(job.outcomes):
            outcomes[job.first + n] = outcome
            if outcome is ReadOutcome.OK:
                self._counts["read_bytes"] += job.into[n].nbytes
                if job.uses[n] < fresh_ns:
                    self._note_use(job.keys[n])
        if job.damaged:  # so that an intact copy can be written
            self._client.submit(lambda changes: changes.remove_damaged(job.damaged))

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._working():
            await self._writes.wait_for(keys)
            own_epoch = self._own_epoch
            gone = await settled(
                self._client.submit(lambda changes: changes.remove(keys, own_epoch))
            )
            self._counts["deleted"] += gone or 0
            self._check_index()

    async def touch(self, keys: Sequence[Key]) -> None:
        self._open_files()
        for key in keys:
            self._note_use(key)

    def _note_use(self, key: Key) -> None:
        self._touched.pop(key, None)
        self._touched[key] = None
        if len(self._touched) >= SHARED_TOUCHES_MAX:
            self._flush_touches()
        elif self._touch_timer is None:
            self._touch_timer = self._loop.call_later(TOUCH_FLUSH_S, self._flush_touches)

    def _flush_touches(self) -> None:
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        keys, self._touched = list(self._touched), {}
        if keys:
            self._client.submit(lambda changes: changes.refresh(keys))

    async def _noted(self) -> None:
        """Wait until all changes requested so far are in the index."""
        self._flush_touches()
        await settled(self._client.submit(lambda changes: None))

    async def reset(self, epoch: int) -> None:
        """Begin an epoch. The index chooses its number and ignores the caller's."""
        with self._working():
            before, number = self._own_epoch, self._resets.begin()
            self._writes.end_epoch()
            begun = await settled(self._client.submit(lambda changes: changes.begin_epoch(before)))
            self._check_index()
            if begun is None:
                raise TierIoError(f"an epoch cannot be begun in {self._folder}")
            self._own_epoch = begun
            self._resets.end(number)

"""Reads of an LMDB tier: lookup in memory, I/O threads, the caller's buffers.

The event loop's thread owns this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiers.base import Buffer, Key, ReadOutcome
from tiers.io.threads import Call, IoThreads, Together, from_threads, settled
from tiers.lmdb.contents import LmdbContents
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.index import extents_of, payload_bytes_of
from tiers.lmdb.io_jobs import ReadItem, ReadJob, job_bytes
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.recovery.record_table import USE_BYTES

_COUNTERS = ("read_ok", "read_miss", "read_corrupt", "read_busy", "read_bytes", "io_errors")


class LmdbReads:
    """``counts`` are the counters of reads."""

    def __init__(
        self,
        files: LmdbFiles,
        contents: LmdbContents,
        options: LmdbOptions,
        threads: IoThreads,
    ) -> None:
        self._files = files
        self._contents = contents
        self._options = options
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self._threads = threads
        self._post = from_threads(self._end)
        self._queued = 0

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """See ``Tier.read``."""
        if self._queued and self._queued + len(keys) > self._options.queue_records:
            self.counts["read_busy"] += len(keys)
            return [ReadOutcome.BUSY] * len(keys)
        call = Call(ReadOutcome.MISS, len(keys))
        items = self._find(call, keys, into)
        size_max = job_bytes(self._options, sum(item.into.nbytes for item in items))
        whole = Together(self._post)
        jobs: list[ReadJob] = []
        files, epoch, notify = self._files, self._contents.epoch, whole.one_ended
        start = size = 0
        for stop, item in enumerate(items, 1):
            self._contents.allocations.pin(item.extents)
            call.expect(item.waiters, item.position)
            size += item.into.nbytes
            if size >= size_max or stop == len(items):
                jobs.append(ReadJob(items[start:stop], epoch, files.codec, files.file, notify))
                start, size = stop, 0
        self._queued += len(items)
        whole.expect(jobs)
        for job in jobs:
            self._threads.submit(job)
        call.begun()
        await settled(call.done)
        return call.outcomes

    def _find(self, call: Call, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadItem]:
        """Return the records that are present, in the order of their allocations. Settle the
        others."""
        items = []
        records = self._contents.records
        for position, (key, data) in enumerate(zip(keys, into, strict=True)):
            value = records.get(key)
            if value is None:
                self.counts["read_miss"] += 1
            elif payload_bytes_of(value) != data.nbytes:
                self.counts["read_corrupt"] += 1
                call.answer(position, ReadOutcome.CORRUPT)
            else:
                items.append(ReadItem(key, value, extents_of(value), data, position))
        items.sort(key=lambda item: item.extents[0].start)
        return items

    def _end(self, whole: Together) -> None:
        for job in whole.take():
            self._end_job(job)
        self._contents.notify_waiting()

    def _end_job(self, job: ReadJob) -> None:
        contents = self._contents
        self._queued -= len(job.items)
        self.counts["io_errors"] += job.io_errors
        damaged = []
        for item in job.items:
            contents.allocations.unpin(item.extents)
            if job.epoch != contents.epoch:
                item.end(ReadOutcome.MISS)
            elif item.outcome is ReadOutcome.CORRUPT and self._is_still_there(item):
                damaged.append(item.key)
            self.counts[f"read_{item.outcome.value}"] += 1
            if item.outcome is ReadOutcome.OK:
                self.counts["read_bytes"] += item.into.nbytes
            Call.settle(item.waiters, item.outcome)
        contents.forget(damaged)  # makes room for an intact copy

    def _is_still_there(self, item: ReadItem) -> bool:
        """Return True if the record is unchanged except for its time of use."""
        value = self._contents.records.get(item.key)
        return value is not None and value[USE_BYTES:] == item.value[USE_BYTES:]

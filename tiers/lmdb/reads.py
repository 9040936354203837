"""Reads of an LMDB tier: lookup in memory, I/O threads, the caller's buffers.

The event loop's thread owns this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiers.base import Buffer, Key, ReadOutcome
from tiers.io.threads import Call, IoThreads, JobGroup, from_threads, settled
from tiers.lmdb.contents import LmdbContents
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.index import extents_of, payload_bytes_of, start_of
from tiers.lmdb.io_jobs import ReadItem, ReadJob, job_bytes
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.records.record_table import USE_BYTES

_COUNTERS = ("read_ok", "read_miss", "read_corrupt", "read_busy", "read_bytes", "io_errors")
_Found = tuple[int, int, bytes]
"""A present record: its first page, the key's position in the call, and its entry in the index."""


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
        self._queued = self._queued_bytes = 0

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """See ``Tier.read``."""
        if self._queued and self._queued + len(keys) > self._options.queue_records:
            self.counts["read_busy"] += len(keys)
            return [ReadOutcome.BUSY] * len(keys)
        call = Call(ReadOutcome.MISS, len(keys))
        found = self._find(call, keys, into)
        call.expect_answers(len(found))
        self._queued += len(found)
        self._submit(JobGroup(self._post, call, len(found)), found, keys, into)
        call.begun()
        await settled(call.done)
        return call.outcomes

    def _find(self, call: Call, keys: Sequence[Key], into: Sequence[Buffer]) -> list[_Found]:
        """Return the records that are present, in the order of their allocations. Answer the
        others."""
        found = []
        get = self._contents.records.get
        for position, (key, data) in enumerate(zip(keys, into, strict=True)):
            value = get(key)
            if value is None:
                self.counts["read_miss"] += 1
            elif payload_bytes_of(value) != data.nbytes:
                self.counts["read_corrupt"] += 1
                call.answer(position, ReadOutcome.CORRUPT)
            else:
                found.append((start_of(value), position, value))
        found.sort()
        return found

    def _submit(
        self,
        reading: JobGroup[ReadJob],
        found: Sequence[_Found],
        keys: Sequence[Key],
        into: Sequence[Buffer],
    ) -> None:
        """Read these records in jobs. A job begins while the next one is made."""
        self._queued_bytes += sum(into[position].nbytes for _, position, _ in found)
        size_max = job_bytes(self._options, self._queued_bytes)
        files, epoch = self._files, self._contents.epoch
        lease, submit = self._contents.allocations.lease, self._threads.submit
        items: list[ReadItem] = []
        size = 0
        for count, (_, position, value) in enumerate(found, 1):
            data, extents = into[position], extents_of(value)
            lease(extents)
            items.append(ReadItem(keys[position], value, extents, data, position))
            size += data.nbytes
            if size >= size_max or count == len(found):
                submit(ReadJob(items, epoch, files.codec, files.file, reading.end))
                items, size = [], 0

    def _end(self, reading: JobGroup[ReadJob]) -> None:
        for job in reading.take():
            self._end_job(job, reading.call)
        self._contents.notify_waiting()

    def _end_job(self, job: ReadJob, call: Call) -> None:
        contents, counts = self._contents, self.counts
        self._queued -= job.records
        counts["io_errors"] += job.io_errors
        damaged = []
        is_current = job.epoch == contents.epoch
        for item, is_intact in job.results():
            self._queued_bytes -= item.into.nbytes
            contents.allocations.release(item.extents)
            outcome = ReadOutcome.OK if is_intact else ReadOutcome.CORRUPT
            if not is_current:
                outcome = ReadOutcome.MISS
            if outcome is ReadOutcome.OK:
                counts["read_ok"] += 1
                counts["read_bytes"] += item.into.nbytes
            else:
                counts[f"read_{outcome.value}"] += 1
                if is_current and self._is_still_there(item):
                    damaged.append(item.key)
            call.answer(item.position, outcome)
        call.answered(job.records)
        contents.forget(damaged)  # so that an intact copy can be written

    def _is_still_there(self, item: ReadItem) -> bool:
        """Return True if the record is unchanged except for its time of use."""
        value = self._contents.records.get(item.key)
        return value is not None and value[USE_BYTES:] == item.value[USE_BYTES:]

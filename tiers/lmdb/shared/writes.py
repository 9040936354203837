"""Writes of a shared LMDB tier: reserve extents, write payloads, publish records.

``shared.transaction`` states the guarantees of each step. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from tiers.base import Buffer, Key, WriteOutcome
from tiers.io.direct_io import pages_for
from tiers.io.extents import Extents
from tiers.io.threads import Call, IoThreads, settled
from tiers.lmdb.io_jobs import Put, WriteJob, job_bytes
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.shared.commit_thread import CommitClient
from tiers.lmdb.shared.files import SharedLmdbFiles
from tiers.lmdb.shared.transaction import ReservedExtents, WriteTransaction

SPACE_ATTEMPTS = 8
"""Maximum number of attempts to find space per write: other processes may take freed space
first."""

_COUNTERS = ("written", "write_full", "write_failed", "written_bytes")

Record = tuple[Put, Buffer]


class SharedWrites:
    """``counts`` are the counters of writes, ``filling`` the records being written."""

    def __init__(
        self,
        files: SharedLmdbFiles,
        client: CommitClient,
        options: LmdbOptions,
        low_watermark: float,
    ) -> None:
        self._files = files
        self._client = client
        self._options = options
        self._low_watermark = low_watermark
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self.threads = IoThreads("tier-write", options.io_threads)
        self.filling: dict[Key, Put] = {}
        self._epochs_ended = 0
        # still reserved, because the index had no space to free them
        self._unused: list[Extents] = []

    def end_epoch(self) -> None:
        """End the epoch. Records that are being written belong to the old epoch and will fail."""
        self.filling = {}
        self._epochs_ended += 1

    async def write(
        self, keys: Sequence[Key], buffers: Sequence[Buffer], own_epoch: int | None
    ) -> list[WriteOutcome]:
        """See ``Tier.write``. Writes under ``own_epoch`` (``None``: the common one)."""
        is_long = len(self.filling) + len(keys) > self._options.queue_records
        if self.filling and is_long:
            self.counts["write_failed"] += len(keys)
            return [WriteOutcome.FAILED] * len(keys)
        call = Call(WriteOutcome.FAILED, len(keys))
        own: list[Record] = []
        for position, (key, data) in enumerate(zip(keys, buffers, strict=True)):
            put = self.filling.get(key)
            if put is None:
                put = self.filling[key] = Put(key, 0, data.nbytes, ())
                own.append((put, data))
            call.expect(put.waiters, position)
        # A task, so that it continues when this call is cancelled. A loop that ends cancels it,
        # too, perhaps before it begins.
        filling = asyncio.ensure_future(self._fill(own, own_epoch, self._epochs_ended))
        filling.add_done_callback(partial(self._filled, own))
        call.begun()
        try:
            await settled(call.done)
        finally:
            await settled(filling)
        return call.outcomes

    async def wait_for(self, keys: Sequence[Key]) -> None:
        """Wait until pending writes of these keys have ended."""
        filling = [put for key in keys if (put := self.filling.get(key)) is not None]
        if filling:
            call = Call(WriteOutcome.FAILED, len(filling))
            for position, put in enumerate(filling):
                call.expect(put.waiters, position)
            call.begun()
            await settled(call.done)

    async def _fill(self, own: list[Record], own_epoch: int | None, epochs_ended: int) -> None:
        """Allocate extents for the records and write them. Settle records that get no extents as
        ``FULL``."""
        try:
            left = await self._write_all(own, own_epoch, epochs_ended)
        except Exception:  # waiting callers need an answer after any failure
            self._settle([record for record in own if record[0].waiters], WriteOutcome.FAILED)
            raise
        self._settle(left, WriteOutcome.FULL)

    def _filled(self, own: list[Record], filling: asyncio.Future[None]) -> None:
        """Settle the records that a cancelled ``_fill`` leaves. Threads end those that got
        extents."""
        if filling.cancelled():
            left = [record for record in own if record[0].waiters and not record[0].extents]
            self._settle(left, WriteOutcome.FAILED)

    async def _write_all(
        self, own: list[Record], own_epoch: int | None, epochs_ended: int
    ) -> list[Record]:
        """Write all records for which there is space, or for which space can be freed. Returns the
        rest. ``epochs_ended`` is as it was at the call: a reset may come before this begins."""
        pages_max = self._files.pages_max - 1
        left = [record for record in own if pages_for(record[1].nbytes) <= pages_max]
        self._settle([r for r in own if pages_for(r[1].nbytes) > pages_max], WriteOutcome.FULL)
        for attempt in range(SPACE_ATTEMPTS):
            if not left:
                break
            needed = [pages_for(data.nbytes) for _put, data in left]
            if attempt and not await self._make_space(needed):
                break
            reserving = self._reserve(left, own_epoch)
            try:
                found = await settled(reserving)
            except asyncio.CancelledError:
                self._abandon_all(reserving.result())
                raise
            if found is None or epochs_ended != self._epochs_ended:  # it failed, or a reset came
                self._abandon_all(found)
                self._settle(left, WriteOutcome.FAILED)
                return []
            left = self._send(left, found, own_epoch)
        return left

    def _reserve(
        self, records: list[Record], own_epoch: int | None
    ) -> asyncio.Future[ReservedExtents | None]:
        wanted = [(put.key, pages_for(data.nbytes)) for put, data in records]
        files = self._files
        return self._client.submit(
            lambda changes: changes.reserve(wanted, own_epoch, files.records_max, files.grow)
        )

    async def _make_space(self, pages: list[int]) -> bool:
        """Make space for some of the records that need these numbers of pages. Returns False if
        that is impossible."""
        files = self._files
        has_unused = bool(self._unused)
        self._abandon([])
        if await self._client.submit(lambda changes: changes.roll_back(files.member.is_alive)):
            return True
        if has_unused and not self._unused:
            return True
        pages_max = files.pages_max - 1
        ahead = pages_max - int(pages_max * self._low_watermark)
        # Not for all records of a long call at once, which might evict everything.
        free_pages = max(ahead, max(pages), min(sum(pages), pages_max // 2))
        records_max = int(files.records_max * self._low_watermark)
        evicted = await self._client.submit(lambda changes: changes.evict(free_pages, records_max))
        return evicted is not None

    def _send(
        self, records: list[Record], found: ReservedExtents, own_epoch: int | None
    ) -> list[Record]:
        """Pass the records that got an allocation to the I/O threads. Returns the others."""
        left: list[Record] = []
        jobs: list[list[tuple[Put, Buffer, int]]] = []
        size_max = job_bytes(self._options, sum(data.nbytes for _put, data in records))
        size = size_max
        for n, record in enumerate(records):
            (put, data), extents = record, found.allocations[n]
            if found.present[n]:
                self._settle([record], WriteOutcome.OK)
            elif extents is None:
                left.append(record)
            else:
                put.allocate(extents, found.epoch)
                if size >= size_max:
                    jobs.append([])
                    size = 0
                jobs[-1].append((put, data, found.uses[n]))
                size += data.nbytes
        for job in jobs:
            self._submit(job, own_epoch)
        return left

    def _submit(self, job: list[tuple[Put, Buffer, int]], own_epoch: int | None) -> None:
        puts, data, uses = (list(column) for column in zip(*job, strict=True))
        client, files = self._client, self._files
        allocations: list[Extents] = [put.extents for put in puts]

        def publish(_puts: Sequence[Put]) -> None:
            client.submit_then(lambda changes: changes.publish(puts, own_epoch), end, flushes=True)

        def end(is_published: bool) -> None:
            if not is_published:
                self._abandon(allocations)
            self._end_write(puts, is_published)

        def fail(_puts: Sequence[Put]) -> None:
            client.post(self._abandon, allocations)
            client.post(self._end_write, puts, True)  # the job has set the outcomes

        self.threads.submit(WriteJob(puts, data, uses, files.codec, files.file, publish, fail))

    def _abandon(self, allocations: Sequence[Extents]) -> None:
        """Free allocations to which nothing was written. If the index has no space for that, they
        remain unusable until the next write that finds no space tries again."""
        given, self._unused = [*self._unused, *allocations], []

        def end(is_done: bool) -> None:
            if not is_done:
                self._unused += given

        if given:
            self._client.submit_then(partial(WriteTransaction.abandon, allocations=given), end)

    def _abandon_all(self, found: ReservedExtents | None) -> None:
        """Free all allocations of a reservation."""
        if found is not None:
            self._abandon([extents for extents in found.allocations if extents is not None])

    def _end_write(self, puts: list[Put], is_done: bool) -> None:
        for put in puts:
            if not is_done:
                put.note_outcome(WriteOutcome.FAILED)
            self._settle([(put, None)], put.outcome)

    def _settle(self, records: Sequence[tuple[Put, Buffer | None]], outcome: WriteOutcome) -> None:
        """Count these records as ended and notify their waiters."""
        names = {WriteOutcome.OK: "written", WriteOutcome.FULL: "write_full"}
        for put, _data in records:
            if self.filling.get(put.key) is put:
                del self.filling[put.key]
            self.counts[names.get(outcome, "write_failed")] += 1
            if outcome is WriteOutcome.OK and put.extents:
                self.counts["written_bytes"] += put.payload_bytes
            Call.settle(put.waiters, outcome)

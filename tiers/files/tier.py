"""The file tier: one record per file, for file systems on which LMDB cannot be used.

``record_files`` and ``exclusive_folder`` describe the files. ``reset`` stores the new epoch; the
folder of the old one is removed in the background. The tier is slower than ``lmdb.tier`` because
the file system must create and remove a file per record.

Ownership: everything belongs to the event loop's thread. Disk accesses run in the tier's ``depth``
daemon threads, one record at a time, so that a mount that hangs stops neither the loop nor the
threads of other tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    StoredKeys,
    TierInfo,
    WriteOutcome,
    stored_keys,
)
from tiers.files.exclusive_folder import ExclusiveFolder
from tiers.files.record_files import Entry
from tiers.folders.folder_tier import Files, FolderTier, Stoppable
from tiers.io.direct_io import pages_for
from tiers.io.threads import DaemonThreads, settled
from tiers.record import NO_NAMESPACE, Identity, UseClock, check_identity, check_records


class RecordFileTier(FolderTier[Files]):
    """The common part of the exclusive and the shared tier of one file per record."""

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        namespace: bytes = NO_NAMESPACE,
        rank: int = 0,
        epoch: int = 0,
        depth: int = 16,
    ) -> None:
        super().__init__(Path(path))
        self._capacity_bytes = capacity_bytes
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._wanted_epoch = epoch
        self._depth = depth

    def _begin(self, files: Files, undo: ExitStack) -> None:
        self._serial = 0
        self._counts = dict.fromkeys(("written", "read_ok", "read_miss", "read_corrupt"), 0)
        self._threads = DaemonThreads("tier-file", self._depth)
        undo.callback(self._threads.stop)

    def footprint_bytes(self, payload_bytes: int) -> int:
        return (1 + pages_for(payload_bytes)) * ALIGNMENT


class FileTier(RecordFileTier[ExclusiveFolder]):
    """A tier with one file per record. ``path`` is this rank's folder."""

    async def open(self) -> TierInfo:
        arguments = (self._folder, self._identity, self._wanted_epoch, self._capacity_bytes)
        folder = await self._open_in_thread(ExclusiveFolder, *arguments)
        used, epochs = self._used_bytes, (folder.epoch, folder.found_epoch)
        count = len(self._entries)
        return TierInfo("file", self._capacity_bytes, used, count, True, folder.medium, *epochs)

    def _begin(self, folder: ExclusiveFolder, undo: ExitStack) -> None:
        super()._begin(folder, undo)
        self._epoch = folder.epoch
        self._entries = folder.take_entries()
        sizes = (self.footprint_bytes(e.payload_bytes) for e in self._entries.values())
        self._used_bytes = sum(sizes)
        self._old_bytes = 0  # the part of ``_used_bytes`` that records of earlier epochs take
        last_use_ns = max((entry.use_ns for entry in self._entries.values()), default=0)
        self._uses = UseClock(last_use_ns + 1)
        self._filling: dict[Key, asyncio.Task[WriteOutcome]] = {}
        self._removing: dict[Key, asyncio.Future[None]] = {}
        self._reclaiming: asyncio.Future[None] | None = None
        self._counts["dropped_at_open"] = folder.dropped
        self._counts["quarantined"] = int(folder.was_quarantined)
        self._reclaim(folder, 0)

    # -- information about the tier -----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under which records are written and read now."""
        return self._epoch

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._open_files()
        found = sorted(self._entries.items(), key=lambda item: item[1])
        for batch in stored_keys((key, entry.payload_bytes) for key, entry in found):
            yield batch

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = dict(self._counts)
        if self._files is not None:
            counts |= {"records": len(self._entries), "used_bytes": self._used_bytes}
            counts["epoch"] = self._epoch
        return counts

    # -- writing ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working() as folder:
            check_records(keys, buffers)
            tasks = []
            for key, data in zip(keys, buffers, strict=True):
                task = self._filling.get(key)
                if task is None:
                    [use_ns] = self._uses.take(1)
                    coroutine = self._write_one(folder, key, data, self._epoch, use_ns)
                    task = self._filling[key] = asyncio.create_task(coroutine)
                tasks.append(task)
            return await self._finish(tasks)

    async def _write_one(
        self, folder: ExclusiveFolder, key: Key, data: Buffer, epoch: int, use_ns: int
    ) -> WriteOutcome:
        try:
            while (removing := self._removing.get(key)) is not None:
                await asyncio.wait([removing])  # otherwise this would remove the new record
            if key in self._entries:
                return WriteOutcome.OK
            size = self.footprint_bytes(data.nbytes)
            if self._used_bytes + size > self._capacity_bytes and self._reclaiming is not None:
                await asyncio.wait([self._reclaiming])
            if self._used_bytes + size > self._capacity_bytes:
                return WriteOutcome.FULL
            self._used_bytes += size
            self._serial += 1
            outcome = WriteOutcome.FAILED
            try:
                writing = self._threads.run(folder.write, key, epoch, data, use_ns, self._serial)
                outcome = await settled(writing)
            finally:
                if outcome is not WriteOutcome.OK and epoch == self._epoch:
                    self._used_bytes -= size
            if outcome is WriteOutcome.OK and epoch != self._epoch:
                return WriteOutcome.FAILED
            if outcome is WriteOutcome.OK:
                self._entries[key] = Entry(use_ns, data.nbytes)
                self._counts["written"] += 1
            return outcome
        finally:
            if self._filling.get(key) is asyncio.current_task():
                del self._filling[key]

    # -- reading ---------------------------------------------------------------------------

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working() as folder:
            tasks = [
                asyncio.create_task(self._read_one(folder, key, data))
                for key, data in zip(keys, into, strict=True)
            ]
            outcomes = await self._finish(tasks)
            for outcome in outcomes:
                self._counts[f"read_{outcome.value}"] += 1
            return outcomes

    async def _read_one(self, folder: ExclusiveFolder, key: Key, into: Buffer) -> ReadOutcome:
        entry, epoch = self._entries.get(key), self._epoch
        if entry is None:
            return ReadOutcome.MISS
        if entry.payload_bytes != into.nbytes:
            return ReadOutcome.CORRUPT
        is_good = await settled(self._threads.run(folder.read, key, epoch, into))
        if epoch != self._epoch or (not is_good and self._entries.get(key) is not entry):
            return ReadOutcome.MISS
        if not is_good:
            removing = self._remove(folder, [key])  # so that an intact copy can be written
            await asyncio.wait([removing])
            removing.exception()  # if this fails, the next read finds and removes the record
        return ReadOutcome.OK if is_good else ReadOutcome.CORRUPT

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._working() as folder:
            filling = [task for key in keys if (task := self._filling.get(key)) is not None]
            if filling:
                await settled(asyncio.ensure_future(asyncio.wait(filling)))
            await self._finish([self._remove(folder, keys)])

    def _remove(self, folder: ExclusiveFolder, keys: Sequence[Key]) -> asyncio.Future[None]:
        """Remove keys from memory now and from the disk soon; the future completes after both."""
        gone = []
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._used_bytes -= self.footprint_bytes(entry.payload_bytes)
                gone.append(key)
        removing = self._threads.run(folder.remove, gone, self._epoch)
        self._removing |= dict.fromkeys(gone, removing)
        removing.add_done_callback(lambda _: self._removed(gone, removing))
        return removing

    def _removed(self, keys: Sequence[Key], removing: asyncio.Future[None]) -> None:
        for key in keys:
            if self._removing.get(key) is removing:
                del self._removing[key]

    async def touch(self, keys: Sequence[Key]) -> None:
        with self._working() as folder:
            present = [key for key in keys if key in self._entries]
            uses = list(zip(present, self._uses.take(len(present)), strict=True))
            for key, use_ns in uses:
                self._entries[key] = self._entries.pop(key)._replace(use_ns=use_ns)
            await self._finish([self._threads.run(folder.touch, uses, self._epoch)])

    async def reset(self, epoch: int) -> None:
        with self._working() as folder:
            self._epoch = max(epoch, self._epoch + 1)
            old_bytes = self._used_bytes - self._old_bytes
            self._entries = {}
            self._filling = {}
            await self._finish([self._threads.run(folder.begin, self._epoch)])
            self._reclaim(folder, old_bytes)

    def _reclaim(self, folder: ExclusiveFolder, old_bytes: int) -> None:
        """Remove folders of other epochs in the background, which frees ``old_bytes``."""
        before = self._reclaiming
        self._old_bytes += old_bytes
        self._reclaiming = asyncio.ensure_future(self._remove_old(folder, old_bytes, before))

    async def _remove_old(
        self, folder: ExclusiveFolder, old_bytes: int, before: asyncio.Future[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._threads.run(folder.remove_old)
        self._used_bytes -= old_bytes
        self._old_bytes -= old_bytes

    # -- closing ---------------------------------------------------------------------------

    async def _end_work(self) -> None:
        if self._reclaiming is not None:
            await asyncio.wait([self._reclaiming])

    def _threads_in_use(self) -> Sequence[Stoppable]:
        return (self._threads,)

"""The exclusive disk tier: LMDB keeps the index, and a preallocated file beside it keeps the
payloads.

    write   allocation -> I/O thread (tag, O_DIRECT write) -> commit thread (flush of the payload
            file, then one LMDB transaction for all waiting records) -> present
    read    lookup in memory -> I/O thread (O_DIRECT read into the caller's buffer, tag) -> done

``lmdb.files`` opens the files, ``lmdb.contents`` tracks which records are present, ``lmdb.writes``
and ``lmdb.reads`` implement the two paths above. This module has the interface and controls the
lifetime of these parts.

An allocation is free again only when the transaction that deleted its record is durable and no read
uses it. ``capacity_bytes`` covers the whole folder: payloads, index and page 0.

Epochs only increase: ``reset(e)`` begins epoch ``max(e, current + 1)``, so every reset forgets all
records, even if ``e`` was already used before a restart.

Ownership: everything in this class belongs to the event loop's thread. Jobs and changes go to other
threads through queues and come back through ``call_soon_threadsafe``. An open tier belongs to one
loop and one process; using it after a fork is a ``TierIoError``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    Scrubbed,
    StoredKeys,
    TierInfo,
    WriteOutcome,
)
from tiers.folders.folder_tier import FolderTier, Stoppable
from tiers.io.direct_io import DiskIo, pages_for
from tiers.io.threads import IoThreads, from_threads
from tiers.lmdb.commit_thread import Change, Clear, CommitThread, Remove
from tiers.lmdb.contents import LmdbContents
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.io_jobs import Put
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.reads import LmdbReads
from tiers.lmdb.scrub import LmdbScrub
from tiers.lmdb.writes import LmdbWrites
from tiers.record import Identity, check_identity, check_records

SPARE_THREADS = 2
"""Number of threads beyond the queue depth: while some verify or seal, others keep the device
busy."""


class LmdbTier(FolderTier[LmdbFiles]):
    """A disk tier with an LMDB index and a payload file. ``path`` is this rank's folder."""

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
        changed = replace(options or LmdbOptions(), **changes)
        super().__init__(Path(path), changed.close_timeout_s)
        self._options = changed
        self._capacity_bytes = capacity_bytes
        check_identity(Identity(changed.namespace, changed.rank))
        self._io = io or DiskIo()
        self._counts_of_parts: tuple[dict[str, int], ...] = ()

    # -- opening and closing ---------------------------------------------------------------

    async def open(self) -> TierInfo:
        arguments = (self._folder, self._capacity_bytes, self._options, self._io)
        files = await self._open_in_thread(LmdbFiles, *arguments)
        capacity_bytes, count = (files.pages_max - 1) * ALIGNMENT, len(self._contents.records)
        medium, epochs = files.index.manifest.file_id, (self.epoch, files.found_epoch)
        return TierInfo("lmdb", capacity_bytes, self.used_bytes, count, True, medium, *epochs)

    def _begin(self, files: LmdbFiles, undo: ExitStack) -> None:
        self._counts["dropped_at_open"] = len(files.recovered.bad)
        self._counts["quarantined"] = int(files.was_quarantined)
        threads = self._options.io_threads + SPARE_THREADS
        self._read_threads = IoThreads("tier-read", threads)
        undo.callback(self._read_threads.stop)
        self._write_threads = IoThreads("tier-write", threads)
        undo.callback(self._write_threads.stop)
        ended = from_threads(self._on_commit)
        self._committer = CommitThread(files.index, files.file, self._write_threads.busy, ended)
        undo.callback(self._committer.stop)
        contents = self._contents = LmdbContents(files, self._committer)
        common = (files, contents, self._options)
        self._reads = LmdbReads(*common, self._read_threads)
        self._writes = LmdbWrites(*common, self._write_threads, ended)
        self._scrub = LmdbScrub(self._folder, files, contents, self._read_threads)
        parts = (contents, self._reads, self._writes, self._scrub)
        self._counts_of_parts = tuple(part.counts for part in parts)

    def _on_commit(self, batch: Sequence[Change]) -> None:
        """Handle a batch that was committed or failed as a whole, or puts that failed before the
        commit."""
        for change in batch:
            if isinstance(change, Put):
                self._writes.end(change)
            elif isinstance(change, Remove | Clear):
                self._contents.end_removal(change)
        self._contents.notify_waiting()

    def _index_failure(self) -> Exception | None:
        return self._committer.failure

    async def _end_work(self) -> None:
        self._contents.flush_touches()

    def _threads_in_use(self) -> Sequence[Stoppable]:
        return (self._read_threads, self._write_threads, self._committer)

    # -- information about the tier -----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under which records are written and read now."""
        return self._contents.epoch

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocations, including those of records that are being written or
        deleted."""
        return self._contents.allocations.used_pages * ALIGNMENT

    def footprint_bytes(self, payload_bytes: int) -> int:
        return pages_for(payload_bytes) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._open_files()
        for batch in self._contents.records.by_use():
            yield batch

    def stats(self) -> dict[str, Any]:
        counts: dict[str, Any] = dict(self._counts)
        for part in self._counts_of_parts:
            counts |= part
        files = self._files
        if files is not None:
            counts["records"] = len(self._contents.records)
            counts["used_bytes"] = self.used_bytes
            counts["file_bytes"] = files.file_pages * ALIGNMENT
            counts["epoch"] = self.epoch
            counts["direct_io"] = int(files.file.direct)
            counts["commits"] = self._committer.counters.commits
            counts["sync_failures"] = self._committer.counters.sync_failures
        return counts

    def check(self) -> None:
        """Raise ``AssertionError`` if the parts of this tier disagree. For tests."""
        self._contents.check()

    # -- records ---------------------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working():
            check_records(keys, buffers)
            return await self._writes.write(keys, buffers)

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working():
            return await self._reads.read(keys, into)

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._working():
            await self._writes.wait_for(keys)
            self._contents.forget(keys)

    async def touch(self, keys: Sequence[Key]) -> None:
        self._open_files()
        self._contents.touch(keys)

    async def scrub(self, bytes_max: int, period_s: float) -> Scrubbed | None:
        with self._working():
            try:
                return await self._scrub.step(bytes_max, period_s)
            except (OSError, lmdb.Error) as error:
                return Scrubbed(trouble=str(error))

    async def reset(self, epoch: int) -> None:
        with self._working():
            await self._contents.reset(epoch)
            self._check_index()

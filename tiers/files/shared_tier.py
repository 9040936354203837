"""The file tier that engines of several machines share: one record per file.

``shared_folder`` describes the files and how the capacity is kept. There is no central process, so
the capacity is not exact: an engine that finds the folder above it evicts the least recently used
records. Nothing about the folder is cached: every query goes to the file system.

``reset`` starts a new epoch, because the weights of this engine have changed. This engine is the
only user of the new epoch, and no engine finds records of the old one any more. Another machine may
find them for as long as its mount caches names (NFS: ``acdirmax``, usually 60 s).

Ownership: everything belongs to the event loop's thread. Disk accesses run in the tier's ``depth``
daemon threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    TierInfo,
    WriteOutcome,
    stored_keys,
)
from tiers.files.engines import TOUCH_S
from tiers.files.shared_folder import COMMON, SharedFolder
from tiers.files.tier import RecordFileTier
from tiers.folders.folder_tier import Stoppable
from tiers.io.resets import Resets
from tiers.io.threads import DaemonThreads
from tiers.record import UseClock, check_records

PRESENT_AT_ONCE = 32
"""Number of keys that one thread looks up at a time."""
CALL_THREADS = 4
"""These threads are separate from those that move payloads, so that queries do not wait for
payloads. Reads and writes have separate threads too, because all writers wait while one of them
scans the folder."""
TOUCHES_AT_ONCE = 256


class SharedFileTier(RecordFileTier[SharedFolder], SharedTier):
    """A file tier that several machines share. ``path`` is a folder that all sharers see, each
    under its own path. An odd ``epoch`` means that this engine's weights are not those of the
    model's files."""

    def __init__(
        self, path: str | Path, capacity_bytes: int, *, noted_epoch: int = 0, **options: Any
    ) -> None:
        """``options`` are those of ``FileTier``. ``noted_epoch`` is the last one that a process
        which did not share the folder has begun: a folder that may still have its records of
        earlier epochs is refused."""
        super().__init__(path, capacity_bytes, **options)
        self._was_reset = noted_epoch > 0

    async def open(self) -> TierInfo:
        weights = (self._wanted_epoch % 2 == 1, self._was_reset)
        arguments = (self._folder, self._identity, self._capacity_bytes, *weights)
        folder = await self._open_in_thread(SharedFolder, *arguments)
        used, count, epoch = folder.found_bytes, folder.found_count, self._wanted_epoch
        capacity_bytes, medium = folder.capacity_bytes, folder.medium
        return TierInfo("file", capacity_bytes, used, count, True, medium, epoch, epoch)

    def _begin(self, folder: SharedFolder, undo: ExitStack) -> None:
        super()._begin(folder, undo)
        self._resets = Resets()
        self._uses = UseClock(folder.last_use_ns + 1)
        self._filling: dict[Key, asyncio.Future[WriteOutcome]] = {}
        self._storing = DaemonThreads("tier-file-store", self._depth)
        undo.callback(self._storing.stop)
        self._calls = DaemonThreads("tier-ask", CALL_THREADS)
        undo.callback(self._calls.stop)
        self._renewing = asyncio.ensure_future(self._renew(folder))

    async def _renew(self, folder: SharedFolder) -> None:
        while True:
            await asyncio.sleep(TOUCH_S)
            for step in (folder.renew, folder.remove_gone):
                done = self._threads.run(step)
                await asyncio.wait([done])
                done.exception()  # the next read or write raises the error

    # -- information about the tier -----------------------------------------------------------

    async def keys(self) -> AsyncIterator[StoredKeys]:
        with self._working() as folder:
            entries = await self._finish([self._threads.run(folder.entries, folder.epoch)])
        found = entries[0].items()
        for batch in stored_keys((key, entry.payload_bytes) for key, entry in found):
            yield batch

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Return which keys can be read now. The caller must limit the waiting time and the number
        of concurrent calls, because calls on a hanging mount return only when the mount is back."""
        with self._working() as folder:
            if self._resets.is_open:
                return [False] * len(keys)
            resets, run = self._resets.begun, self._calls.run
            starts = range(0, len(keys), PRESENT_AT_ONCE)
            parts = [list(keys[start : start + PRESENT_AT_ONCE]) for start in starts]
            answers = await self._finish([run(folder.are_there, p, folder.epoch) for p in parts])
            if resets != self._resets.begun:
                return [False] * len(keys)
            return [is_there for answer in answers for is_there in answer]

    def stats(self) -> dict[str, Any]:
        return dict(self._counts)

    # -- writing and reading ---------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._working() as folder:
            check_records(keys, buffers)
            if self._resets.is_open:
                return [WriteOutcome.FAILED] * len(keys)
            resets = self._resets.begun
            asked = []
            for key, data in zip(keys, buffers, strict=True):
                if key not in self._filling:
                    self._serial += 1
                    use = (*self._uses.take(1), self._serial)
                    storing = self._storing.run(folder.store, key, folder.epoch, data, *use)
                    self._filling[key] = storing
                    storing.add_done_callback(self._end_of(key))
                asked.append(self._filling[key])
            outcomes = await self._finish(asked)
            if resets != self._resets.begun:
                return [WriteOutcome.FAILED] * len(keys)
            self._counts["written"] += outcomes.count(WriteOutcome.OK)
            return outcomes

    def _end_of(self, key: Key) -> Callable[[asyncio.Future[WriteOutcome]], None]:
        def end(storing: asyncio.Future[WriteOutcome]) -> None:
            if self._filling.get(key) is storing:
                del self._filling[key]

        return end

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._working() as folder:
            if self._resets.is_open:
                return [ReadOutcome.MISS] * len(keys)
            resets = self._resets.begun
            pairs = zip(keys, into, strict=True)
            run = self._threads.run
            outcomes = await self._finish([run(folder.fetch, k, folder.epoch, d) for k, d in pairs])
            if resets != self._resets.begun:
                outcomes = [ReadOutcome.MISS] * len(keys)
            for outcome in outcomes:
                self._counts[f"read_{outcome.value}"] += 1
            return outcomes

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._working() as folder:
            await self._finish([one for key in keys if (one := self._filling.get(key))])
            await self._finish([self._threads.run(folder.remove, list(keys), folder.epoch)])

    async def touch(self, keys: Sequence[Key]) -> None:
        with self._working() as folder:
            uses = list(zip(keys, self._uses.take(len(keys)), strict=True))
            parts = [uses[n : n + TOUCHES_AT_ONCE] for n in range(0, len(uses), TOUCHES_AT_ONCE)]
            run = self._threads.run
            await self._finish([run(folder.touch, part, folder.epoch) for part in parts])

    async def reset(self, epoch: int) -> None:
        """Begin an epoch with a random number, whatever number the caller passes."""
        with self._working() as folder:
            number = self._resets.begin()
            self._filling = {}
            await self._finish([self._threads.run(folder.begin_own)])
            self._resets.end(number)
            assert folder.epoch != COMMON, "this engine has left the common epoch"
            self._threads.run(folder.remove_gone)

    # -- closing ---------------------------------------------------------------------------

    async def _end_work(self) -> None:
        self._renewing.cancel()

    def _threads_in_use(self) -> Sequence[Stoppable]:
        return (self._threads, self._storing, self._calls)

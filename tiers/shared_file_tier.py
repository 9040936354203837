"""One record per file, in a folder that engines of several machines share.

``shared_folder`` says what lies where and how the cap is kept: there is no process at the centre,
so it is a bound, and each engine removes what nobody has used for longest when it finds too much.
Nothing is remembered of what the folder holds: every question goes to the file system.

``reset`` says that this engine has other weights from now on: it goes on under an epoch of its own,
and what was stored under the one it leaves exists for nobody. Another machine may see it for as
long as its mount keeps names in memory (NFS: ``acdirmax``, usually 60 s).

Ownership: everything belongs to the event loop's thread; everything that touches the disk runs in
``depth`` daemon threads of the tier's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
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
    stored_keys,
)
from tiers.calls import settled
from tiers.daemon_threads import DaemonThreads, in_thread
from tiers.direct_io import pages_for
from tiers.live_engines import TOUCH_S
from tiers.record import NO_NAMESPACE, Identity, check_identity, check_key, check_payload
from tiers.shared_folder import COMMON, SharedFolder

PRESENT_AT_ONCE = 32
"""Keys that one thread looks for at a time."""
QUESTION_THREADS = 4
"""Apart from those that move payloads: a question takes no time behind them. Nor does a read behind
those that store, which wait for each other while one of them scans the folder."""
TOUCHES_AT_ONCE = 256

T = TypeVar("T")


class SharedFileTier(Tier):
    """See the module. ``path`` is a folder that all who share see under their own paths. An odd
    ``epoch`` says that this engine's weights are not those of the model's files."""

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
        self._path = Path(path)
        self._capacity_bytes = capacity_bytes
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._given_epoch = epoch
        self._depth = depth
        self._folder: SharedFolder | None = None
        self._closing: asyncio.Future[None] | None = None
        self._counts: dict[str, int] = {}

    async def open(self) -> TierInfo:
        if self._folder is not None:
            raise TierIoError(f"the tier in {self._path} is open already")
        is_own = self._given_epoch % 2 == 1
        arguments = (self._path, self._identity, self._capacity_bytes, is_own)
        opening = in_thread(SharedFolder, *arguments)
        try:
            folder = await settled(opening)
            stored, _alive = await settled(in_thread(folder.scan))
        except (OSError, asyncio.CancelledError) as error:
            if opening.exception() is None:
                opening.result().close()
            if isinstance(error, OSError):
                raise TierIoError(f"cannot open the tier in {self._path}: {error}") from error
            raise
        self._pid = os.getpid()
        self._epochs_begun = self._epochs_reached = self._serial = 0
        self._last_use_ns = max((one.use_ns for one in stored), default=0)
        self._filling: dict[Key, asyncio.Future[WriteOutcome]] = {}
        self._working: set[asyncio.Future[Any]] = set()
        self._threads = DaemonThreads("tier-file", self._depth)
        self._storing = DaemonThreads("tier-file-store", self._depth)
        self._questions = DaemonThreads("tier-ask", QUESTION_THREADS)
        names = ("written", "read_ok", "read_miss", "read_corrupt")
        self._counts = dict.fromkeys(names, 0)
        self._closing = None
        self._folder = folder
        self._renewing = asyncio.ensure_future(self._renew(folder))
        used = sum(one.size_bytes for one in stored)
        epoch, count = self._given_epoch, len(stored)
        medium = (folder.medium, epoch, epoch)
        return TierInfo("file", self._capacity_bytes, used, count, True, *medium, shared=True)

    async def _renew(self, folder: SharedFolder) -> None:
        while True:
            await asyncio.sleep(TOUCH_S)
            for step in (folder.renew, folder.remove_gone):
                done = self._threads.run(step)
                await asyncio.wait([done])
                done.exception()  # whoever reads or writes next is told

    # -- what it says of itself ------------------------------------------------------------

    def footprint_bytes(self, payload_bytes: int) -> int:
        return (1 + pages_for(payload_bytes)) * ALIGNMENT

    async def keys(self) -> AsyncIterator[StoredKeys]:
        with self._open_folder() as folder:
            entries = await self._finish([self._threads.run(folder.entries, folder.epoch)])
        found = entries[0].items()
        for batch in stored_keys((key, entry.payload_bytes) for key, entry in found):
            yield batch

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these can be read now. Whoever asks bounds how long, and how many at a time: a
        mount that hangs answers when it is back."""
        with self._open_folder() as folder:
            if self._is_resetting:
                return [False] * len(keys)
            epochs_begun, run = self._epochs_begun, self._questions.run
            starts = range(0, len(keys), PRESENT_AT_ONCE)
            parts = [list(keys[start : start + PRESENT_AT_ONCE]) for start in starts]
            answers = await self._finish([run(folder.are_there, p, folder.epoch) for p in parts])
            if epochs_begun != self._epochs_begun:
                return [False] * len(keys)
            return [is_there for answer in answers for is_there in answer]

    def stats(self) -> dict[str, Any]:
        return dict(self._counts)

    @property
    def _is_resetting(self) -> bool:
        """Until a reset is done, also one that failed, nothing is stored or found."""
        return self._epochs_reached < self._epochs_begun

    @contextmanager
    def _open_folder(self) -> Iterator[SharedFolder]:
        if self._folder is None:
            raise TierClosedError(f"the tier in {self._path} is not open")
        if os.getpid() != self._pid:
            raise TierIoError(f"the tier in {self._path} cannot be used after a fork")
        yield self._folder

    async def _finish(self, asked: Sequence[asyncio.Future[T]]) -> list[T]:
        """Wait for all of them, also when cancelled: their buffers are the caller's. Raises
        ``TierIoError``."""
        if not asked:
            return []
        done = asyncio.ensure_future(asyncio.wait(asked))
        self._working.add(done)
        try:
            await settled(done)
        finally:
            self._working.discard(done)
        return [_result(one, self._path) for one in asked]

    # -- writing and reading ---------------------------------------------------------------

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        with self._open_folder() as folder:
            for key, data in zip(keys, buffers, strict=True):
                check_key(key)
                check_payload(data.nbytes)
            if self._is_resetting:
                return [WriteOutcome.FAILED] * len(keys)
            epochs_begun = self._epochs_begun
            asked = []
            for key, data in zip(keys, buffers, strict=True):
                if key not in self._filling:
                    self._serial += 1
                    use = (self._next_use_ns(), self._serial)
                    storing = self._storing.run(folder.store, key, folder.epoch, data, *use)
                    self._filling[key] = storing
                    storing.add_done_callback(self._end_of(key))
                asked.append(self._filling[key])
            outcomes = await self._finish(asked)
            if epochs_begun != self._epochs_begun:
                return [WriteOutcome.FAILED] * len(keys)
            self._counts["written"] += outcomes.count(WriteOutcome.OK)
            return outcomes

    def _end_of(self, key: Key) -> Callable[[asyncio.Future[WriteOutcome]], None]:
        def end(storing: asyncio.Future[WriteOutcome]) -> None:
            if self._filling.get(key) is storing:
                del self._filling[key]

        return end

    def _next_use_ns(self) -> int:
        self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
        return self._last_use_ns

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        with self._open_folder() as folder:
            if self._is_resetting:
                return [ReadOutcome.MISS] * len(keys)
            epochs_begun = self._epochs_begun
            pairs = zip(keys, into, strict=True)
            run = self._threads.run
            outcomes = await self._finish([run(folder.fetch, k, folder.epoch, d) for k, d in pairs])
            if epochs_begun != self._epochs_begun:
                outcomes = [ReadOutcome.MISS] * len(keys)
            for outcome in outcomes:
                self._counts[f"read_{outcome.value}"] += 1
            return outcomes

    # -- deleting, recency, reset ----------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> None:
        with self._open_folder() as folder:
            await self._finish([one for key in keys if (one := self._filling.get(key))])
            await self._finish([self._threads.run(folder.remove, list(keys), folder.epoch)])

    async def touch(self, keys: Sequence[Key]) -> None:
        with self._open_folder() as folder:
            uses = [(key, self._next_use_ns()) for key in keys]
            parts = [uses[n : n + TOUCHES_AT_ONCE] for n in range(0, len(uses), TOUCHES_AT_ONCE)]
            run = self._threads.run
            await self._finish([run(folder.touch, part, folder.epoch) for part in parts])

    async def reset(self, epoch: int) -> None:
        """The number of the epoch that begins is drawn, whatever the caller's is."""
        with self._open_folder() as folder:
            self._epochs_begun += 1
            begun = self._epochs_begun
            self._filling = {}
            await self._finish([self._threads.run(folder.begin_own)])
            self._epochs_reached = max(self._epochs_reached, begun)
            assert folder.epoch != COMMON, "it has weights of its own now"
            self._threads.run(folder.remove_gone)

    # -- closing ---------------------------------------------------------------------------

    async def aclose(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            self._renewing.cancel()
            self._closing = asyncio.ensure_future(self._close(folder))
        if self._closing is not None:
            await asyncio.shield(self._closing)  # goes on although nobody waits for it any more

    async def _close(self, folder: SharedFolder) -> None:
        while self._working:
            await asyncio.wait(list(self._working))
        await in_thread(_end, *self._stops(), folder.close)

    def _stops(self) -> list[Callable[[], None]]:
        return [pool.stop for pool in (self._threads, self._storing, self._questions)]


def _end(*steps: Callable[[], None]) -> None:
    for step in steps:
        step()


def _result(future: asyncio.Future[T], path: Path) -> T:
    """What a thread returned. Raises ``TierIoError``."""
    error = future.exception()
    if isinstance(error, OSError):
        raise TierIoError(f"the tier in {path} failed: {error}") from error
    return future.result()

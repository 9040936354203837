"""The scrub of an LMDB tier: reads and verifies records that no request reads, a few at a time.

A pass goes through the index in key order. A small file (``scrub``) stores its position, so that
even a server that is restarted every day finishes a pass. A pass begins one period after the
previous one began.

A record counts as damaged if its tag does not match in two reads. If reads fail, page 0 is read as
well; if that fails too, the medium is at fault, and no record is deleted.

Owned by the event loop's thread; the tier's threads read the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.base import ALIGNMENT, Buffer, Key, Scrubbed
from tiers.io.direct_io import Scratch, pages_for
from tiers.io.threads import IoThreads, from_threads, settled
from tiers.lmdb.contents import LmdbContents
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.index import extents_of, payload_bytes_of
from tiers.lmdb.io_jobs import ReadItem, ReadJob
from tiers.lmdb.records.record_table import USE_BYTES
from tiers.record import KEY_BYTES_MAX

MARK_NAME = "scrub"
KEYS_AT_ONCE = 64
SCRUBBED_BYTES_MAX = 256 << 20
"""Longer payloads are not scrubbed; a damaged index could claim any length."""
KEPT_BYTES_MAX = 8 << 20
MARK_EVERY_S = 60.0
"""The position is stored this often. After a crash, records read since the last stored position are
read again."""


@dataclass(slots=True)
class _Mark:
    """The position of a pass. ``last`` is the last key that it read, or ``None`` before the first
    and after the last key. ``begun`` is the time at which it began, in seconds since 1970, or 0 if
    no pass has begun."""

    begun: float = 0.0
    last: Key | None = None

    @classmethod
    def load(cls, path: Path) -> _Mark:
        """Read the position; start from the beginning if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                found = json.loads(file.read(4096))
            last = bytes.fromhex(found["last"])
            return cls(float(found["begun"]), last[:KEY_BYTES_MAX] or None)
        return cls()

    def store(self, path: Path) -> None:
        """Replace the file. If that fails, the old file remains."""
        last = (self.last or b"").hex()
        draft = path.with_name(f"{path.name}.new")
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump({"begun": self.begun, "last": last}, file)
            os.replace(draft, path)


class LmdbScrub:
    """``counts`` are the counters of scrubs."""

    def __init__(
        self,
        folder: Path,
        files: LmdbFiles,
        contents: LmdbContents,
        threads: IoThreads,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder / MARK_NAME
        self._files = files
        self._contents = contents
        self.counts = {"scrubbed": 0, "scrub_damaged": 0}
        self._threads = threads
        self._clock = clock
        self._mark: _Mark | None = None
        self._marked_at = 0.0
        self._scratch = Scratch(ALIGNMENT)

    async def step(self, bytes_max: int, period_s: float) -> Scrubbed | None:
        """See ``Tier.scrub``."""
        now = self._clock()
        if self._mark is None:
            self._mark = await self._in_thread(lambda _: _Mark.load(self._path))
        mark, begun = self._mark, self._mark.begun
        if mark.last is None:  # between two passes
            if begun and 0 <= now - begun < period_s:
                return None
            begun = now
        after = mark.last
        keys = await self._in_thread(lambda _: self._files.index.keys_after(after, KEYS_AT_ONCE))
        items, seen = self._choose(keys, bytes_max)
        found = await self._check(items)
        if found.trouble:
            return found
        mark.begun, mark.last = begun, keys[seen - 1] if seen else None
        if seen == len(keys) < KEYS_AT_ONCE:
            mark.last = None
        if mark.last is None or now - self._marked_at >= MARK_EVERY_S:
            self._marked_at = now
            await self._in_thread(lambda _: mark.store(self._path))
        return found

    def _choose(self, keys: Sequence[Key], bytes_max: int) -> tuple[list[ReadItem], int]:
        """Choose which of these keys to read, at least one. Also returns how many keys were
        considered."""
        chosen: list[tuple[Key, bytes, int]] = []
        size = seen = 0
        for seen, key in enumerate(keys, 1):  # noqa: B007  # the number is the result
            value = self._contents.records.get(key)
            if value is not None and (count := payload_bytes_of(value)) <= SCRUBBED_BYTES_MAX:
                chosen.append((key, value, count))
                size += pages_for(count) * ALIGNMENT
            if size >= bytes_max:
                break
        buffer = self._buffer(size)
        items = []
        for position, (key, value, count) in enumerate(chosen):
            into, buffer = buffer[:count], buffer[pages_for(count) * ALIGNMENT :]
            items.append(ReadItem(key, value, extents_of(value), into, position))
        return items, seen

    def _buffer(self, size: int) -> Buffer:
        """Return memory for ``size`` bytes. Only memory of ordinary size is kept for reuse."""
        scratch = self._scratch if size <= KEPT_BYTES_MAX else Scratch(ALIGNMENT)
        return scratch.at_least(size)

    async def _check(self, items: Sequence[ReadItem]) -> Scrubbed:
        """Read and verify the records; delete the damaged ones."""
        contents, epoch = self._contents, self._contents.epoch
        for item in items:
            contents.allocations.lease(item.extents)
        try:
            bad = await self._read(items, epoch)
            bad = await self._read(bad, epoch)
            is_sick = bool(bad) and not await self._in_thread(self._can_read)
        finally:
            for item in items:
                contents.allocations.release(item.extents)
            contents.notify_waiting()
        if is_sick:
            return Scrubbed(trouble="its payload file cannot be read")
        damaged = [item.key for item in bad if self._is_still_there(item, epoch)]
        contents.forget(damaged)
        self.counts["scrubbed"] += len(items)
        self.counts["scrub_damaged"] += len(damaged)
        return Scrubbed(len(items), sum(item.into.nbytes for item in items), tuple(damaged))

    async def _read(self, items: Sequence[ReadItem], epoch: int) -> list[ReadItem]:
        """Read the records and return those that are damaged."""
        if not items:
            return []
        job = ReadJob(items, epoch, self._files.codec, self._files.file)
        await self._in_thread(job.run)
        return [item for item, is_intact in job.results() if not is_intact]

    def _can_read(self, scratch: Scratch) -> bool:
        try:
            self._files.file.read([scratch.at_least(ALIGNMENT)], 0)
        except OSError:
            return False
        return True

    def _is_still_there(self, item: ReadItem, epoch: int) -> bool:
        """Return True if the record is unchanged except for its time of use."""
        value = self._contents.records.get(item.key)
        is_same = value is not None and value[USE_BYTES:] == item.value[USE_BYTES:]
        return is_same and epoch == self._contents.epoch

    async def _in_thread(self, function: Callable[[Scratch], Any]) -> Any:
        """Run ``function`` in a thread of the tier. Waits until it ends even when cancelled,
        because it uses the tier's files. Raises the function's exceptions."""
        job = _ThreadCall(function, from_threads(_ThreadCall.end))
        self._threads.submit(job)
        return await settled(job.done)


class _ThreadCall:
    """A function to run in an I/O thread."""

    def __init__(
        self, function: Callable[[Scratch], Any], post: Callable[[_ThreadCall], None]
    ) -> None:
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._function = function
        self._post = post
        self._result: Any = None
        self._error: Exception | None = None

    def run(self, scratch: Scratch) -> None:
        """Call the function."""
        try:
            self._result = self._function(scratch)
        except Exception as error:  # the thread must continue, and the waiter gets the error
            self._error = error

    def notify(self) -> None:
        """Pass the result to the loop."""
        self._post(self)

    def end(self) -> None:
        """Complete the future, on the loop's thread."""
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(self._result)

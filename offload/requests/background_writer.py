"""Writes one file in the background, with ``aiofiles``, for the request log and the trace recorder.

Speed does not matter here, but vLLM's scheduler thread must never wait for the disk. ``put`` and
``close`` belong to that thread. The ``write`` coroutine runs on the event loop of one daemon
thread, and its file system calls run on another. Nothing here joins a thread that may hang on a
dead disk, so the process can always exit (docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import aiofiles

from offload.loop import EventLoopThread
from tiers.io.threads import DaemonExecutor

T = TypeVar("T")

Write = Callable[[AsyncIterator[list[T]], Executor], Awaitable[None]]
"""Function that writes batches until none are left; the executor is for ``aiofiles``."""

logger = logging.getLogger(__name__)

WAITING_ITEMS_MAX = 1024
"""Maximum number of items that wait for the writer."""


class BackgroundWriter(Generic[T]):
    """Passes items to ``write`` in batches.

    ``dropped`` counts the items that were not passed on, because ``WAITING_ITEMS_MAX`` items were
    waiting or because ``write`` had ended. ``task`` names the work in log messages, ``thread``
    names the threads.
    """

    def __init__(self, thread: str, task: str, write: Write[T]) -> None:
        self.dropped = 0
        self._task = task
        self._waiting: deque[T] = deque()
        self._more = asyncio.Event()
        self._is_woken = False
        self._is_closing = False
        self._executor = DaemonExecutor(f"{thread}-io")
        self._thread = EventLoopThread(thread)
        self._done = self._thread.start(self._run(write))

    def put(self, item: T) -> None:
        """Queue an item, which must not change afterwards. Never waits and never raises."""
        if self._is_closing or self._done.done() or len(self._waiting) >= WAITING_ITEMS_MAX:
            self.dropped += 1
            return
        self._waiting.append(item)
        self._wake()

    def close(self, timeout_s: float) -> None:
        """Write the waiting items, within a time limit. A writer that hangs is left to its daemon
        threads."""
        if self._is_closing:
            return
        due = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake()
        try:
            self._done.result(timeout_s)
        except FutureTimeout:
            logger.warning("kvtiers: %s did not end within %g s", self._task, timeout_s)
            return
        self._executor.shutdown(wait=False)
        self._thread.stop(max(0.1, due - time.monotonic()))

    def _wake(self) -> None:
        """Wake the writer. ``_batches`` clears the flag before it reads the queue, so it misses no
        item that is queued in between."""
        if not self._is_woken or self._is_closing:
            self._is_woken = True
            self._thread.loop.call_soon_threadsafe(self._more.set)

    async def _run(self, write: Write[T]) -> None:
        try:
            await write(self._batches(), self._executor)
        except Exception as error:
            # an error ends the recording with a message; the server continues
            logger.error("kvtiers: %s ended: %s", self._task, error)

    async def _batches(self) -> AsyncIterator[list[T]]:
        while True:
            await self._more.wait()
            self._more.clear()
            self._is_woken = False
            is_last = self._is_closing
            if batch := [self._waiting.popleft() for _ in range(len(self._waiting))]:
                yield batch
            if is_last:
                return


@asynccontextmanager
async def opened(
    path: str, mode: str, opener: Callable[[str, int], int], executor: Executor
) -> AsyncIterator[Any]:
    """Open a binary file and close it, both on the executor. ``async with aiofiles.open`` closes it
    on the loop's default executor (aiofiles 25.1 and earlier), whose threads Python joins at
    exit."""
    file = await aiofiles.open(path, mode, opener=opener, executor=executor)
    try:
        yield file
    finally:
        await file.close()


def private(path: str, flags: int) -> int:
    """An ``opener`` that replaces an existing file by a new one that only its owner can read."""
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o600)


def not_followed(path: str, flags: int) -> int:
    """An ``opener`` that does not follow links and does not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

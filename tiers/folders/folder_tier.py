"""What every tier over a folder does alike: it opens the folder in a thread, belongs to one process
and one loop, and closes when nobody is inside any more.

What is open is the ``store``: files and locks, without threads. The threads that use it are the
tier's; they end before the store is closed, however long they hang.

Ownership: everything belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tiers.base import Tier, TierClosedError, TierIoError
from tiers.io.awaiting import settled
from tiers.io.daemon_threads import in_thread


class OpenFiles(Protocol):
    """The open files of a tier."""

    def close(self) -> None:
        """Release everything; only when nobody uses it any more. Blocks."""


class Ending(Protocol):
    """Threads that use a store."""

    def stop(self) -> None:
        """Finish what is queued and end. Blocks, for as long as some thread hangs."""


Open = TypeVar("Open", bound=OpenFiles)
T = TypeVar("T")


class FolderTier(Tier, Generic[Open]):
    """See the module."""

    def __init__(self, folder: Path, close_timeout_s: float | None = None) -> None:
        """``close_timeout_s`` is how long closing waits for calls, and again for threads (``None``:
        to their end). What hangs longer is left behind, and closes the store when it is through."""
        self._folder = folder
        self._close_timeout_s = close_timeout_s
        self._files: Open | None = None
        self._closing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {}

    # -- what a tier says of itself --------------------------------------------------------

    @abstractmethod
    def _begin(self, files: Open, undo: ExitStack) -> None:
        """Make what works on a store that was just opened. ``undo`` ends the threads of it if
        something fails. Raises ``RuntimeError`` if the process may have no more."""

    @abstractmethod
    def _threads_in_use(self) -> Sequence[Ending]:
        """Those that end before the store is closed, in this order."""

    async def _end_work(self) -> None:
        """What is left to do when no call is inside any more, before the threads end."""

    def _index_failure(self) -> Exception | None:
        """Why the index cannot be written any more, if so."""
        return None

    # -- opening ---------------------------------------------------------------------------

    async def _open_in_thread(self, make: Callable[..., Open], *arguments: object) -> Open:
        """Have a thread make the store, and begin to work on it. Raises ``TierIoError``; nothing
        is left open then."""
        if self._files is not None:
            raise TierIoError(f"the tier in {self._folder} is open already")
        with self._saying("opened"):
            opening = in_thread(make, *arguments)
        try:
            files = await settled(opening)
        except OSError as error:
            raise TierIoError(f"cannot open the tier in {self._folder}: {error}") from error
        except asyncio.CancelledError:
            if opening.exception() is None:
                opening.result().close()
            raise
        self._pid = os.getpid()
        self._active = 0
        self._idle: asyncio.Future[None] | None = None
        self._closing = None
        with ExitStack() as undo, self._saying("opened"):
            undo.callback(files.close)  # here, because it may be a thread that cannot be had
            self._begin(files, undo)
            undo.pop_all()
        self._files = files
        return files

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """Around the start of threads: that there are no more is a ``TierIoError``, too."""
        try:
            yield
        except RuntimeError as error:
            raise TierIoError(f"the tier in {self._folder} cannot be {what}: {error}") from error

    # -- being open ------------------------------------------------------------------------

    def _open_files(self) -> Open:
        """The store, if it can be used. Raises ``TierClosedError`` and ``TierIoError``."""
        if self._files is None or self._closing is not None:
            raise TierClosedError(f"the tier in {self._folder} is not open")
        if os.getpid() != self._pid:
            raise TierIoError(
                f"the tier in {self._folder} was opened by process {self._pid} and cannot be used "
                f"in process {os.getpid()}. Open it after the fork"
            )
        self._check_index()
        return self._files

    def _check_index(self) -> None:
        failure = self._index_failure()
        if failure is not None:
            raise TierIoError(
                f"the index in {self._folder} cannot be written any more: {failure!r}. "
                "Close the tier and open it again"
            ) from failure

    @contextmanager
    def _working(self) -> Iterator[Open]:
        """Around every public call: checks, and lets ``aclose`` wait for those inside."""
        files = self._open_files()
        self._active += 1
        try:
            yield files
        finally:
            self._active -= 1
            if not self._active and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    async def _finish(self, asked: Sequence[asyncio.Future[T]]) -> list[T]:
        """What threads answered, waited for also when cancelled or when one has failed: their
        buffers are the caller's. Raises ``TierIoError``."""
        await settled(asyncio.gather(*asked, return_exceptions=True))
        try:
            return [one.result() for one in asked]
        except OSError as error:
            raise TierIoError(f"the tier in {self._folder} failed: {error}") from error

    # -- closing ---------------------------------------------------------------------------

    async def aclose(self) -> None:
        never_began = self._closing is not None and self._closing.cancelled()
        if self._files is not None and (self._closing is None or never_began):
            self._closing = asyncio.ensure_future(self._close(self._files))
        if self._closing is None:
            return
        if self._close_timeout_s is not None:  # it ends: a cancelled caller sees a free folder too
            await settled(self._closing)
        else:
            await asyncio.shield(self._closing)  # goes on although nobody waits for it any more

    async def _close(self, files: Open) -> None:
        try:
            if self._active:
                self._idle = asyncio.get_running_loop().create_future()
                await asyncio.wait([self._idle], timeout=self._close_timeout_s)
            await self._end_work()
            with self._saying("closed"):
                closing = in_thread(_close_files, files, *self._threads_in_use())
        except BaseException:  # also of a loop that ends
            self._closing = None  # it is still open, and can be closed later
            raise
        try:
            await asyncio.wait([closing], timeout=self._close_timeout_s)
        finally:
            self._files = self._closing = None  # the thread closes it, whoever waits for that
        if closing.done():  # else hung threads use the files, which are closed when they end
            closing.result()


def _close_files(files: OpenFiles, *threads: Ending) -> None:
    for each in threads:
        each.stop()
    files.close()

"""The base of all tiers over a folder: opens it in a thread, ties it to one process and loop, and
closes it.

The open files and locks are the tier's ``files``. The threads that use them belong to the tier;
files are closed only after these threads have ended, even if they hang for long.

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
from tiers.io.threads import in_thread, settled


class OpenFiles(Protocol):
    """The open files and locks of a tier."""

    def close(self) -> None:
        """Release everything. Call it only when nothing uses the files any more. Blocks."""


class Stoppable(Protocol):
    """Threads that use the open files."""

    def stop(self) -> None:
        """Finish the queued work and end the threads. Blocks as long as a thread hangs."""


Files = TypeVar("Files", bound=OpenFiles)
T = TypeVar("T")


class FolderTier(Tier, Generic[Files]):
    """A tier over one folder. See the module's docstring."""

    def __init__(self, folder: Path, close_timeout_s: float | None = None) -> None:
        """``close_timeout_s`` limits how long closing waits for calls, and then again for threads
        (``None``: until they end). Threads that hang longer are left behind and close the files
        when they end."""
        self._folder = folder
        self._close_timeout_s = close_timeout_s
        self._files: Files | None = None
        self._closing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {}

    # -- parts that each tier defines -------------------------------------------------------

    @abstractmethod
    def _begin(self, files: Files, undo: ExitStack) -> None:
        """Create everything that works on the opened files. Register the end of started threads
        with ``undo``, in case a later step fails. Raises ``RuntimeError`` if no thread can be
        started."""

    @abstractmethod
    def _threads_in_use(self) -> Sequence[Stoppable]:
        """Return the threads that end before the files are closed, in this order."""

    async def _end_work(self) -> None:
        """Finish remaining work when no call is active, before the threads end."""

    def _index_failure(self) -> Exception | None:
        """Return the reason why the index cannot be written any more, or ``None``."""
        return None

    # -- opening ---------------------------------------------------------------------------

    async def _open_in_thread(self, make: Callable[..., Files], *arguments: object) -> Files:
        """Open the files in a thread and begin to work on them. On failure, raises ``TierIoError``
        and leaves nothing open."""
        if self._files is not None:
            raise TierIoError(f"the tier in {self._folder} is open already")
        with self._naming_errors("opened"):
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
        with ExitStack() as undo, self._naming_errors("opened"):
            undo.callback(files.close)  # closes in this thread, because no other may be available
            self._begin(files, undo)
            undo.pop_all()
        self._files = files
        return files

    @contextmanager
    def _naming_errors(self, what: str) -> Iterator[None]:
        """Turn the ``RuntimeError`` of a thread that could not be started into a
        ``TierIoError``."""
        try:
            yield
        except RuntimeError as error:
            raise TierIoError(f"the tier in {self._folder} cannot be {what}: {error}") from error

    # -- being open ------------------------------------------------------------------------

    def _open_files(self) -> Files:
        """Return the open files. Raises ``TierClosedError`` and ``TierIoError``."""
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
    def _working(self) -> Iterator[Files]:
        """Wrap every public call: check the tier, and let ``aclose`` wait for active calls."""
        files = self._open_files()
        self._active += 1
        try:
            yield files
        finally:
            self._active -= 1
            if not self._active and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    async def _finish(self, asked: Sequence[asyncio.Future[T]]) -> list[T]:
        """Wait for the threads' results, even when cancelled or when one has failed, because they
        use the caller's buffers. Raises ``TierIoError``."""
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
        if (
            self._close_timeout_s is not None
        ):  # wait for the end, so that the folder is free for a cancelled caller, too
            await settled(self._closing)
        else:
            # continues although no caller waits for it any more
            await asyncio.shield(self._closing)

    async def _close(self, files: Files) -> None:
        try:
            if self._active:
                self._idle = asyncio.get_running_loop().create_future()
                await asyncio.wait([self._idle], timeout=self._close_timeout_s)
            await self._end_work()
            with self._naming_errors("closed"):
                closing = in_thread(_close_files, files, *self._threads_in_use())
        except BaseException:  # including the cancellation when the loop ends
            self._closing = None  # still open; it can be closed later
            raise
        try:
            await asyncio.wait([closing], timeout=self._close_timeout_s)
        finally:
            self._files = self._closing = (
                None  # the thread closes the files, whether or not anything waits for it
            )
        if closing.done():  # otherwise hung threads close the files when they end
            closing.result()


def _close_files(files: OpenFiles, *threads: Stoppable) -> None:
    for each in threads:
        each.stop()
    files.close()

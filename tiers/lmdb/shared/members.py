"""The processes that share one folder on a local disk. Each holds a number until it ends.

    <folder>/owner.lock         shared (flock) by all of them; exclusive for an exclusive tier
    <folder>/sharer-<n>.lock    held (flock) by the process with number n; its pid, for messages

A number becomes free when its process ends, for whatever reason: the kernel releases the lock. So
neither a reused pid nor a process in another container can be mistaken for it. The leftover lock
files have no meaning.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tiers.folders.folder import LOCK_NAME, LOCK_WAIT_S, MEMBERS_MAX, FolderError, try_flock
from tiers.folders.lock_file import LockFile

OPENING_NAME = "opening.lock"
OPENING_WAIT_S = 120.0
"""Long enough for the first process to check the files."""


@contextlib.contextmanager
def opening_lock(folder: Path) -> Iterator[None]:
    """Let only one process at a time open the folder. Raises ``FolderError``."""
    file = _open(folder / OPENING_NAME)
    try:
        if not try_flock(file.fd, fcntl.LOCK_EX, OPENING_WAIT_S):
            raise FolderError(
                f"{folder} is still being opened by another process after {OPENING_WAIT_S:g} s"
            )
        yield
    finally:
        file.close()


class Member:
    """This process as one of those that share a folder. Create it inside ``opening_lock``."""

    def __init__(self, folder: Path) -> None:
        """Raises ``FolderError`` if an exclusive tier uses the folder, or too many processes share
        it."""
        self._folder = folder
        self._common = _open(folder / LOCK_NAME)
        self._own: LockFile | None = None
        self.number = -1
        # A process that only looks up the owner holds the lock briefly and is no sharer: without
        # the wait, this process would trust tables that no running process keeps.
        self.is_alone = try_flock(self._common.fd, fcntl.LOCK_EX, LOCK_WAIT_S)
        """True if no other process used the folder at the start. False after ``join``."""
        try:
            if not self.is_alone and not try_flock(self._common.fd, fcntl.LOCK_SH):
                owner = os.pread(self._common.fd, 32, 0).decode("ascii", "replace").strip()
                raise FolderError(
                    f"{folder} is in use by process {owner or 'unknown'}, which does not share it. "
                    'Stop it, or give all of them "shared": true'
                )
            self._take_number()
        except BaseException:  # release the lock after any failure
            self.release()
            raise

    def _take_number(self) -> None:
        for number in range(MEMBERS_MAX):
            file = _open(_path(self._folder, number))
            if try_flock(file.fd, fcntl.LOCK_EX):
                self._own, self.number = file, number
                with contextlib.suppress(OSError):  # the disk may be full; the lock is held anyway
                    os.ftruncate(file.fd, 0)
                    os.pwrite(file.fd, f"{os.getpid()}\n".encode(), 0)
                return
            file.close()
        raise FolderError(f"{self._folder} is shared by {MEMBERS_MAX} processes already")

    def join(self) -> None:
        """Let other processes join. Raises ``FolderError`` if an exclusive tier took the folder in
        between."""
        if not try_flock(self._common.fd, fcntl.LOCK_SH, LOCK_WAIT_S):
            raise FolderError(f"{self._folder} was taken by a process that does not share it")
        self.is_alone = False

    def is_alive(self, number: int) -> bool:
        """Return True if a process holds this number. While this checks, no process can take the
        number."""
        if number == self.number:
            return True
        file = _open(_path(self._folder, number))
        try:
            return not try_flock(file.fd, fcntl.LOCK_EX)
        finally:
            file.close()

    def release(self) -> None:
        """Give up the number and the folder. Idempotent."""
        for file in (self._own, self._common):
            if file is not None:
                file.close()


def _path(folder: Path, number: int) -> Path:
    return folder / f"sharer-{number}.lock"


def _open(path: Path) -> LockFile:
    try:
        return LockFile(path)
    except OSError as error:
        raise FolderError(f"cannot open the lock {path}: {error}") from error

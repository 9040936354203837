"""Files that a process locks (``flock``).

The kernel keeps a ``flock`` until the last descriptor of the open file is closed, and a forked
child has a copy of each. So a child closes its copies at once; otherwise it would hold the locks of
its parent, even after the parent was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_CHECKED = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATED = _CHECKED | os.O_RDWR | os.O_CREAT


class LockFile:
    """An open file to lock. In a forked child it is closed: ``fd`` is -1."""

    def __init__(self, path: Path, *, creates: bool = True) -> None:
        """Open or create. Without ``creates``, open an existing file, for reading only. Raises
        ``OSError``."""
        self.fd = os.open(path, _CREATED if creates else _CHECKED, 0o600)
        self._pid = os.getpid()
        _open_files.add(self)

    def close(self) -> None:
        """Unlock and close. Idempotent. A child that was forked without Python's knowledge, or that
        has not yet begun another program, may have a copy, so closing alone is not enough."""
        if self.fd >= 0 and os.getpid() == self._pid:  # a child must not unlock its parent's file
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.close_copy()

    def close_copy(self) -> None:
        """Close the descriptor, which leaves copies in other processes locked."""
        fd, self.fd = self.fd, -1  # first: another thread may fork while the file is closed
        _open_files.discard(self)
        if fd >= 0:
            os.close(fd)


_open_files: set[LockFile] = set()
"""Includes files that nothing refers to any more, because they are still locked."""


def _close_copies() -> None:
    for file in list(_open_files):
        with contextlib.suppress(OSError):  # the other locks must be closed, too
            file.close_copy()


os.register_at_fork(after_in_child=_close_copies)

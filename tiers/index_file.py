"""The file of an LMDB index: preallocated up to the size of its map, so that no commit meets a full
disk, and never shorter than that, because LMDB would end the process by SIGBUS."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_room(path: Path, map_bytes: int) -> None:
    """Raise ``OSError`` if the disk has no room for an index of ``map_bytes`` there. Asked first,
    because a try would fill the disk for others. Folders may be missing."""
    size_bytes = path.stat().st_size if path.exists() else 0
    disk = os.statvfs(next(above for above in path.absolute().parents if above.exists()))
    free_bytes = disk.f_bavail * disk.f_frsize
    if map_bytes - size_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the index for this capacity takes {map_bytes} bytes, and the disk has {free_bytes} "
            "free. Give less capacity",
        )


class IndexFile:
    """See the module. ``path`` exists once LMDB has opened its environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size_bytes = 0

    def reserve(self, map_bytes: int) -> None:
        """Allocate its blocks. Raises ``OSError``; it is as long as it was then."""
        check_room(self.path, map_bytes)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < map_bytes:
                try:
                    os.posix_fallocate(fd, size, map_bytes - size)
                except OSError:
                    os.ftruncate(fd, size)  # what it did get would stay for good
                    raise
        finally:
            os.close(fd)
        self._size_bytes = max(size, map_bytes)

    def check(self) -> None:
        """Raise ``OSError`` if it was cut off since it was reserved."""
        if os.stat(self.path).st_size < self._size_bytes:
            raise OSError(f"{self.path} was truncated while in use")

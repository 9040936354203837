"""The file of an LMDB index: preallocated up to the size of its map, so that no commit meets a full
disk, and never shorter than that, because LMDB would end the process by SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path


class IndexFile:
    """See the module. ``path`` exists once LMDB has opened its environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size_bytes = 0

    def reserve(self, map_bytes: int) -> None:
        """Allocate its blocks. Raises ``OSError``."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < map_bytes:
                os.posix_fallocate(fd, size, map_bytes - size)
        finally:
            os.close(fd)
        self._size_bytes = max(size, map_bytes)

    def check(self) -> None:
        """Raise ``OSError`` if it was cut off since it was reserved."""
        if os.stat(self.path).st_size < self._size_bytes:
            raise OSError(f"{self.path} was truncated while in use")

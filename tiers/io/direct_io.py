"""The payload file: aligned vectored I/O that bypasses the page cache where the file system allows.

``O_DIRECT`` requires addresses, lengths and offsets in multiples of ``ALIGNMENT``. Buffers that
comply move without a copy. For all others the bytes (or only the last, partial page) pass through
the calling thread's ``Scratch``. A ``Mover`` merges neighbouring pieces into one system call.

Many threads may use a ``PayloadFile`` at once (every call names its offset); a ``Mover`` and a
``Scratch`` belong to one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tiers.base import ALIGNMENT, Buffer
from tiers.io.device_queue import DeviceQueue
from tiers.io.extents import Extents

IOV_MAX = 1024
_Transfer = Callable[[int, Sequence[Buffer], int], int]
SCRATCH_BYTES = 1 << 20
IO_DEPTH_MAX = 1024


def pages_for(byte_count: int) -> int:
    """Return the number of pages that hold ``byte_count`` bytes (0 for 0)."""
    return -(-byte_count // ALIGNMENT)


class DiskIo:
    """The system calls used on the payload file. Tests inherit from it to fail the nth call."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        return os.preadv(fd, views, offset)  # type: ignore[arg-type]  # arrays are buffers

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, views, offset)  # type: ignore[arg-type]  # arrays are buffers

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def free_bytes(self, fd: int) -> int:
        """Return the bytes that an ordinary user may still write to the file system of ``fd``."""
        found = os.fstatvfs(fd)
        return found.f_bavail * found.f_frsize


class PayloadFile:
    """An open file of whole pages. Methods raise ``OSError``."""

    def __init__(
        self,
        path: Path,
        io: DiskIo,
        *,
        direct: bool = True,
        read_only: bool = False,
        depth: int = IO_DEPTH_MAX,
    ) -> None:
        """Open the file, or create it unless ``read_only``. Falls back to buffered I/O where
        ``O_DIRECT`` is refused. At most ``depth`` reads and ``depth`` writes are in progress at a
        time; further threads wait."""
        self._io = io
        self._queue = DeviceQueue(depth)
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self.direct = direct
        try:
            self.fd = io.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.direct = False
            self.fd = io.open(path, flags)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def free_bytes(self) -> int:
        return self._io.free_bytes(self.fd)

    def grow(self, size_bytes: int) -> None:
        """Extend the file to at least this length and allocate its blocks."""
        size = self.size_bytes
        if size_bytes > size:
            self._io.allocate(self.fd, size, size_bytes - size)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self.fd, size_bytes)

    def write(self, views: Sequence[Buffer], offset: int) -> None:
        """Write all views consecutively. Lets reads go first."""
        self._queue.begin_write()
        try:
            self._move_all(self._io.pwritev, views, offset)
        finally:
            self._queue.end_write()

    def read(self, views: Sequence[Buffer], offset: int) -> None:
        """Fill all views. Reaching the end of the file also raises ``OSError``."""
        self._queue.begin_read()
        try:
            self._move_all(self._io.preadv, views, offset)
        finally:
            self._queue.end_read()

    def _move_all(self, call: _Transfer, views: Sequence[Buffer], offset: int) -> None:
        wanted = sum(view.nbytes for view in views)
        while wanted:
            moved = call(self.fd, views, offset)
            if moved == wanted:
                return
            if moved <= 0 or moved % ALIGNMENT:
                raise OSError(errno.EIO, f"{moved} of {wanted} bytes at {offset}")
            views, offset, wanted = _without(views, moved), offset + moved, wanted - moved

    def sync(self) -> None:
        self._io.fdatasync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _without(views: Sequence[Buffer], done: int) -> list[Buffer]:
    """Return ``views`` without their first ``done`` bytes."""
    left = []
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
        else:
            left.append(view[done:])
            done = 0
    return left


class Scratch:
    """Aligned memory of one I/O thread, faulted in once. It grows and never shrinks.

    ``Mover`` copies through ``at_least``; ``for_codec`` is separate memory for encoded payloads.
    """

    def __init__(self, size_bytes: int = SCRATCH_BYTES) -> None:
        self.data = self._new(size_bytes)
        self._codec: Scratch | None = None

    def for_codec(self, size_bytes: int) -> Buffer:
        """Like ``at_least``, but from separate memory."""
        if self._codec is None:
            self._codec = Scratch(ALIGNMENT)
        return self._codec.at_least(size_bytes)

    @staticmethod
    def _new(size_bytes: int) -> Buffer:
        data = np.frombuffer(mmap.mmap(-1, max(size_bytes, ALIGNMENT)), np.uint8)
        data[::ALIGNMENT] = 0
        return data

    def at_least(self, size_bytes: int) -> Buffer:
        """Return the first ``size_bytes`` of a buffer that is long enough; its contents are
        undefined."""
        if self.data.nbytes < size_bytes:
            self.data = self._new(pages_for(size_bytes) * ALIGNMENT)
        return self.data[:size_bytes]


class Mover:
    """Collects pieces of records and moves neighbours with one system call. Blocks; one thread."""

    def __init__(self, file: PayloadFile, scratch: Scratch, *, writing: bool) -> None:
        self._file = file
        self._writing = writing
        self._scratch = scratch.at_least(SCRATCH_BYTES)
        self._scratch_used = 0
        self._views: list[Buffer] = []
        self._offset = self._end = 0
        self._copies: list[tuple[Buffer, Buffer]] = []

    def add(self, extents: Extents, data: Buffer) -> None:
        """Move ``data`` to or from ``extents``; the last page may be partial. May do I/O."""
        address = _address_of(data)
        if len(extents) == 1 and not (address | data.nbytes) % ALIGNMENT:
            self._push(extents[0].start * ALIGNMENT, data)
            return
        done = 0
        for extent in extents:
            part = data[done : done + extent.pages * ALIGNMENT]
            self._add_part(extent.start * ALIGNMENT, part, (address + done) % ALIGNMENT == 0)
            done += part.nbytes

    def _add_part(self, offset: int, part: Buffer, is_aligned: bool) -> None:
        whole = part.nbytes - part.nbytes % ALIGNMENT if is_aligned else 0
        if whole:
            self._push(offset, part[:whole])
        while whole < part.nbytes:
            if self._scratch_used == self._scratch.nbytes:
                self.flush()
            buffer = self._scratch[self._scratch_used :]
            piece = part[whole : whole + buffer.nbytes]
            bounce = buffer[: pages_for(piece.nbytes) * ALIGNMENT]
            self._scratch_used += bounce.nbytes
            if self._writing:
                np.copyto(bounce[: piece.nbytes], piece)
                bounce[piece.nbytes :] = 0
            self._push(offset + whole, bounce)
            if not self._writing:
                self._copies.append((piece, bounce[: piece.nbytes]))
            whole += piece.nbytes

    def _push(self, offset: int, view: Buffer) -> None:
        if offset != self._end or len(self._views) == IOV_MAX:
            self._move()
            self._offset = offset
        self._views.append(view)
        self._end = offset + view.nbytes

    def _move(self) -> None:
        views, self._views = self._views, []
        if views:
            (self._file.write if self._writing else self._file.read)(views, self._offset)
        self._offset = self._end

    def flush(self) -> None:
        """Finish all pieces added so far. Read buffers are filled only now."""
        self._move()
        copies, self._copies = self._copies, []
        for target, source in copies:
            np.copyto(target, source)
        self._scratch_used = 0


def _address_of(data: Buffer) -> int:
    """Return the address of the buffer. The general method takes several times as long."""
    if data.flags.writeable and data.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # type: ignore[arg-type]  # arrays are buffers
    return int(data.__array_interface__["data"][0])


def drop_cache(fd: int) -> None:
    """Ask the system to drop cached pages of a file (used by benchmarks and in buffered mode)."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

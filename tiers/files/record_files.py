"""Records as files below one open folder. Every function here blocks; any thread may call.

    <folder>/epoch-<n>/<64 hex>          a record: one page of header and key, then the payload
    <folder>/epoch-<n>/<64 hex>.<x>.tmp  a record being written
    <folder>/capacity                    the capacity at the last open, for inspecting commands

A record's name is a digest of its key, so nothing from outside ever becomes part of a path. The
name appears by ``rename`` after the bytes are flushed. The time of last use is the modification
time.

All names are looked up relative to the folder's descriptor, never by its path: if another disk is
mounted at the path, its records are not mistaken for this tier's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tiers.base import ALIGNMENT, Buffer, Key, TierIoError, WriteOutcome
from tiers.folders.folder import DISK_FULL
from tiers.record import HEADER_BYTES, Identity, RecordError, parse, seal, verify

PREFIX = "epoch-"
CAPACITY_NAME = "capacity"
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Entry(NamedTuple):
    """A present record: its time of last use in ns and the length of its payload."""

    use_ns: int
    payload_bytes: int


def record_name(key: Key) -> str:
    """Return the file name of a record: 64 hexadecimal digits."""
    return hashlib.blake2b(key, digest_size=32).hexdigest()


class RecordFiles:
    """The open folder, held until ``close``. See the module's docstring."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Raises ``OSError``."""
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._identity = identity

    def close(self) -> None:
        """Release the folder. Call it only when no thread uses it any more."""
        os.close(self._fd)

    def check(self) -> None:
        """Raise ``TierIoError`` if the folder was removed, or if another one is at its path."""
        if not self._is_here():
            raise TierIoError(
                f"the folder {self._path} was removed or replaced. Close the tier and open it again"
            )

    def _is_here(self) -> bool:
        """Return True if the path leads to the open folder. Raises ``TierIoError``."""
        try:
            found, ours = os.stat(self._path), os.fstat(self._fd)
        except OSError as error:
            raise TierIoError(f"the folder {self._path} cannot be read: {error}") from error
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    # -- records -----------------------------------------------------------------------------

    def write(
        self, key: Key, epoch: int, data: Buffer, use_ns: int, serial: object
    ) -> WriteOutcome:
        """Store a record, durably. ``serial`` differs between calls; it becomes part of a file
        name."""
        self.check()
        path = self._record(key, epoch)
        temporary = f"{path}.{serial}.tmp"
        try:
            header = seal(self._identity, key, epoch, data, data.nbytes)
            fd = os.open(temporary, _NEW, 0o600, dir_fd=self._fd)
            try:
                os.write(fd, (header + key).ljust(ALIGNMENT, b"\0"))
                _write_all(fd, data)
                os.utime(fd, ns=(use_ns, use_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
            self._publish_record(temporary, path, epoch)
            self._sync(f"{PREFIX}{epoch}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            if error.errno in DISK_FULL:
                return WriteOutcome.FULL
            self.check()
            return WriteOutcome.FAILED
        return WriteOutcome.OK

    def _publish_record(self, temporary: str, path: str, epoch: int) -> None:
        """Rename a complete record of this epoch to its final name. Raises ``OSError``."""
        del epoch  # only one tier uses the folder, so no other can change the epoch
        self._publish(temporary, path)

    def read(self, key: Key, epoch: int, into: Buffer) -> bool:
        """Fill ``into``. Returns True if the record is intact and belongs to this key."""
        try:
            fd = os.open(self._record(key, epoch), READ, dir_fd=self._fd)
            try:
                page = os.read(fd, ALIGNMENT)
                done = 0
                while done < into.nbytes:
                    count = os.readv(fd, [into[done:].data])
                    if not count:
                        return False
                    done += count
            finally:
                os.close(fd)
        except OSError:
            self.check()
            return False
        return verify(page[:HEADER_BYTES], self._identity, key, epoch, into)

    def remove(self, keys: Iterable[Key], epoch: int) -> None:
        """Remove records that may exist. Raises ``TierIoError``."""
        for key in keys:
            try:
                os.unlink(self._record(key, epoch), dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise TierIoError(f"cannot remove from {self._path}: {error}") from error

    def touch(self, uses: Iterable[tuple[Key, int]], epoch: int) -> None:
        """Set times of use in ns where possible. Raises ``TierIoError`` only if the folder is
        gone."""
        try:
            for key, use_ns in uses:
                with contextlib.suppress(FileNotFoundError):
                    path = self._record(key, epoch)
                    os.utime(path, ns=(use_ns, use_ns), dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            self.check()

    def _read_entry(self, folder: int, name: str, epoch: int) -> tuple[Key, Entry] | None:
        """Return the entry of a file; ``None`` unless it is a complete record of this tier under
        its name."""
        try:
            fd = os.open(name, READ | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        try:
            page = os.read(fd, ALIGNMENT)
            found = os.fstat(fd)
            header = parse(page[:HEADER_BYTES])
        except (OSError, RecordError):
            return None
        finally:
            os.close(fd)
        key = page[HEADER_BYTES : HEADER_BYTES + header.key_bytes]
        is_ours = (header.namespace, header.rank, header.epoch) == (*self._identity, epoch)
        is_whole = found.st_size == ALIGNMENT + header.stored_bytes and name == record_name(key)
        if not is_ours or not is_whole:
            return None
        return key, Entry(found.st_mtime_ns, header.payload_bytes)

    def note_capacity(self, capacity_bytes: int) -> None:
        """Store the capacity for commands that inspect the folder. Does nothing if that
        fails."""
        with contextlib.suppress(OSError):
            known = self._load(CAPACITY_NAME) if self._exists(CAPACITY_NAME) else ""
            if known != str(capacity_bytes):
                self._store(CAPACITY_NAME, str(capacity_bytes))

    # -- folders -----------------------------------------------------------------------------

    def _entries_of(self, epoch: int) -> Iterator[tuple[str, tuple[Key, Entry] | None]]:
        """Iterate over every file of an epoch with its entry (``_read_entry``). Reads every header.
        Raises ``OSError``."""
        folder = os.open(f"{PREFIX}{epoch}", READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            for name in os.listdir(folder):
                yield name, self._read_entry(folder, name, epoch)
        finally:
            os.close(folder)

    def _remove_folder(self, name: str) -> None:
        """Remove a folder with its files. Raises ``OSError``."""
        fd = os.open(name, READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            for file in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=self._fd)

    # -- files -------------------------------------------------------------------------------

    @staticmethod
    def _record(key: Key, epoch: int) -> str:
        return f"{PREFIX}{epoch}/{record_name(key)}"

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _load(self, name: str) -> str:
        fd = os.open(name, READ | os.O_NONBLOCK, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ""
            return os.read(fd, 64).decode("ascii", "replace").strip()
        finally:
            os.close(fd)

    def _store(self, name: str, text: str) -> None:
        temporary = f"{name}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
        self._write_new(temporary, text)
        self._publish(temporary, name)
        os.fsync(self._fd)

    def _write_new(self, name: str, text: str) -> None:
        fd = os.open(name, _NEW, 0o600, dir_fd=self._fd)
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, name: str) -> None:
        os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _sync(self, folder: str) -> None:
        fd = os.open(folder, READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def by_use(found: Iterable[tuple[Key, Entry]]) -> dict[Key, Entry]:
    """Sort records, least recently used first."""
    return dict(sorted(found, key=lambda item: item[1]))


def _write_all(fd: int, data: Buffer) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(fd, data[done:].data)

"""The folder of a file tier, held open: what its threads do there. Everything here blocks.

    <folder>/owner.lock
    <folder>/medium                      32 hex digits, drawn when the folder was made
    <folder>/epoch                       the present epoch, decimal
    <folder>/epoch-<n>/<64 hex>          a record: one page of header and key, then the payload
    <folder>/epoch-<n>/<64 hex>.<n>.tmp  a record being written

A record's name is a digest of its key, so nothing from outside ever becomes part of a path. It
appears by ``rename`` after its bytes are flushed. The time of last use is its modification time.

All names are looked up from the descriptor of the folder, never by its path: when another disk is
mounted there, its records are not taken for ours. ``TierIoError`` says that this has happened, or
that the folder is gone; the tier must then be opened again.

Ownership: any thread may call, but ``begin`` only one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tiers.base import ALIGNMENT, Buffer, Key, TierIoError, WriteOutcome
from tiers.folder import OwnerLock, prepare
from tiers.record import HEADER_BYTES, Identity, RecordError, parse, seal, verify

EPOCH_NAME = "epoch"
MEDIUM_NAME = "medium"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PREFIX = "epoch-"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Entry(NamedTuple):
    """A record that is present: its time of last use in ns, and its payload's length."""

    use_ns: int
    payload_bytes: int


def record_name(key: Key) -> str:
    """The file name of a record: 64 hexadecimal digits."""
    return hashlib.blake2b(key, digest_size=32).hexdigest()


class RecordFolder:
    """See the module. ``medium`` changes when the records are lost; ``found_epoch`` is the epoch
    that was on disk, ``epoch`` the present one; ``entries`` is what was found of it, ``dropped``
    how many files were no whole records."""

    def __init__(self, path: Path, identity: Identity, epoch: int) -> None:
        """Check, lock, begin ``epoch`` if that is a later one, and read every header.

        Raises ``TierIoError`` and ``OSError``.
        """
        self._path = path
        self._identity = identity
        with contextlib.ExitStack() as undo:
            prepare(path, allow_network=True)
            self._lock = OwnerLock(path)
            undo.callback(self._lock.release)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._fd)
            self.found_epoch = self.epoch = self._stored_epoch()
            self.medium = self._stored_medium()
            self.begin(max(self.found_epoch, epoch))
            self.entries, self.dropped = self._scan()
            undo.pop_all()

    def close(self) -> None:
        """Let go of the folder; only when nobody calls any more."""
        os.close(self._fd)
        self._lock.release()

    def check(self) -> None:
        """Raise ``TierIoError`` if this folder is not the one at its path any more, or is gone."""
        try:
            found, ours = os.stat(self._path), os.fstat(self._fd)
            is_here = (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
            while is_here:
                epoch = self.epoch
                is_here = self._exists(f"{_PREFIX}{epoch}")
                if is_here or epoch == self.epoch:
                    break
                is_here = True  # another epoch has begun meanwhile: look again
        except OSError as error:
            raise TierIoError(f"the folder {self._path} cannot be read: {error}") from error
        if not is_here:
            raise TierIoError(
                f"the folder {self._path} was removed or exchanged. Close the tier and open it "
                "again"
            )

    # -- epochs ------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Store this epoch, durably; the folder of a later one than the present begins empty.
        Raises ``OSError``."""
        name = f"{_PREFIX}{epoch}"
        if epoch != self.epoch and self._exists(name):
            self._remove_epoch(name)
        if not self._exists(name):
            os.mkdir(name, 0o700, dir_fd=self._fd)
        if epoch != self.epoch or not self._exists(EPOCH_NAME):
            self._store(EPOCH_NAME, str(epoch))
        self.epoch = epoch

    def _stored_epoch(self) -> int:
        """The epoch on disk. An unreadable one counts as beyond all folders there are."""
        try:
            return int(self._load(EPOCH_NAME))
        except (FileNotFoundError, ValueError) as error:
            known = self._epochs()
            if not known and isinstance(error, FileNotFoundError):
                return 0
            return max(known, default=0) + 1

    def _stored_medium(self) -> str:
        """The id on disk; a new one if there is none, or the records it stood for are gone."""
        found = ""
        with contextlib.suppress(FileNotFoundError):
            found = self._load(MEDIUM_NAME)
        if not found or not self._exists(f"{_PREFIX}{self.epoch}"):
            found = secrets.token_hex(16)
            self._store(MEDIUM_NAME, found)
        return found

    def _epochs(self) -> list[int]:
        names = [n for n in os.listdir(self._fd) if n.startswith(_PREFIX)]
        numbers = [name.removeprefix(_PREFIX) for name in names]
        return [int(number) for number in numbers if number.isdecimal()]

    def remove_old(self) -> None:
        """Remove the records of earlier epochs, as far as that is possible."""
        with contextlib.suppress(OSError):
            for epoch in self._epochs():
                if epoch < self.epoch:
                    with contextlib.suppress(OSError):
                        self._remove_epoch(f"{_PREFIX}{epoch}")

    def _remove_epoch(self, name: str) -> None:
        fd = os.open(name, _READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            for file in os.listdir(fd):
                os.unlink(file, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=self._fd)

    # -- records -----------------------------------------------------------------------------

    def write(self, key: Key, epoch: int, data: Buffer, use_ns: int, serial: int) -> WriteOutcome:
        """Store a record, durably. ``serial`` is another one for each call."""
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
            self._publish(temporary, path)
            self._sync(f"{_PREFIX}{epoch}")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            if error.errno in DISK_FULL:
                return WriteOutcome.FULL
            self.check()
            return WriteOutcome.FAILED
        return WriteOutcome.OK

    def read(self, key: Key, epoch: int, into: Buffer) -> bool:
        """Fill ``into``; whether the record is whole and this one."""
        try:
            fd = os.open(self._record(key, epoch), _READ, dir_fd=self._fd)
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
        """Remove records that may be there. Raises ``TierIoError``."""
        for key in keys:
            try:
                os.unlink(self._record(key, epoch), dir_fd=self._fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise TierIoError(f"cannot remove from {self._path}: {error}") from error

    def touch(self, uses: Iterable[tuple[Key, int]], epoch: int) -> None:
        """Note times of use in ns, as far as that is possible. Raises ``TierIoError`` only if the
        folder is not there."""
        try:
            for key, use_ns in uses:
                with contextlib.suppress(FileNotFoundError):
                    path = self._record(key, epoch)
                    os.utime(path, ns=(use_ns, use_ns), dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            self.check()

    def _scan(self) -> tuple[dict[Key, Entry], int]:
        found: dict[Key, Entry] = {}
        dropped = 0
        folder = os.open(f"{_PREFIX}{self.epoch}", _READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            for name in os.listdir(folder):
                entry = self._read_entry(folder, name)
                if entry is None:
                    dropped += 1
                    os.unlink(name, dir_fd=folder)
                else:
                    found[entry[0]] = entry[1]
        finally:
            os.close(folder)
        return dict(sorted(found.items(), key=lambda item: item[1])), dropped

    def _read_entry(self, folder: int, name: str) -> tuple[Key, Entry] | None:
        """What a file says it is; ``None`` unless it is a whole record of this tier by its name."""
        try:
            fd = os.open(name, _READ | os.O_NONBLOCK, dir_fd=folder)
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
        is_ours = (header.namespace, header.rank, header.epoch) == (*self._identity, self.epoch)
        is_whole = found.st_size == ALIGNMENT + header.stored_bytes and name == record_name(key)
        if not is_ours or not is_whole:
            return None
        return key, Entry(found.st_mtime_ns, header.payload_bytes)

    # -- files -------------------------------------------------------------------------------

    @staticmethod
    def _record(key: Key, epoch: int) -> str:
        return f"{_PREFIX}{epoch}/{record_name(key)}"

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _load(self, name: str) -> str:
        fd = os.open(name, _READ | os.O_NONBLOCK, dir_fd=self._fd)
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
        fd = os.open(temporary, _NEW, 0o600, dir_fd=self._fd)
        try:
            os.write(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        self._publish(temporary, name)
        os.fsync(self._fd)

    def _publish(self, temporary: str, name: str) -> None:
        os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _sync(self, folder: str) -> None:
        fd = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: Buffer) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(fd, data[done:].data)

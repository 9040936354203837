"""The folder of a file tier that engines of one or several machines share (NFS, Lustre, CephFS).

    <folder>/shared             marks it, so that no exclusive tier takes it
    <folder>/medium             32 hex digits
    <folder>/engines/           see ``files.engines``
    <folder>/epoch-0/           the records of all engines with the weights of the model's files
    <folder>/epoch-<n>/         the records of one engine with other weights; n is random
    <folder>/gone-<hex>/        a folder that is being removed

Records are stored as in ``record_files``, but while a record is being written, its name ends with
the name of its engine, a number and ``.tmp``. There are no locks, no memory maps and no central
process: each name always leads to one complete file or to none, even if two engines act at the same
time.

**The cap.** The capacity is that of the live engine that joined first. An engine may write
``grant_bytes`` before it scans again what all engines have stored (``scan``). If it finds more than
``capacity - 2 * engines * grant``, it removes the least recently used records. So all engines
together stay below the capacity as long as their scans take about equally long. Each engine that
joins after another engine's last scan can add two grants to the total.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiers.base import ALIGNMENT, Buffer, Key, ReadOutcome, TierIoError, WriteOutcome
from tiers.files.engines import Announced, FolderEngines, engine_name
from tiers.files.exclusive_folder import EPOCH_NAME, MEDIUM_NAME, SHARED_NAME
from tiers.files.record_files import PREFIX, READ, Entry, RecordFiles, by_use
from tiers.folders.folder import LOCK_NAME, FolderError, prepare, try_flock
from tiers.folders.lock_file import LockFile
from tiers.io.direct_io import pages_for
from tiers.record import HEADER_BYTES, Identity, RecordError, parse, verify

logger = logging.getLogger(__name__)

COMMON = 0
GRANTS_MIN = 128
"""Least number of grants into which the capacity is divided. A grant has space for at least one
record."""
GRANTS_EACH = 16
"""With many engines the capacity is divided into this many grants per engine instead, so that two
grants for each engine take at most an eighth of it in total."""
EVICT_SHARE = 0.05
"""An eviction ends this far below the limit, as a fraction of the capacity."""
READ_USE_NS = 60 * 10**9
"""A read does not update a time of use that is more recent than this."""
STRAY_NS = 3600 * 10**9
"""Age at which a temporary file, or a folder that no engine claims, is removed."""
_FOLDER = re.compile(r"epoch-([0-9]+)", re.ASCII)
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.([0-9a-f-]+)\.[0-9]+\.tmp", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file of a record: its folder and name, its length in whole pages, its last use in ns."""

    folder: str
    name: str
    size_bytes: int
    use_ns: int


class SharedFolder(RecordFiles):
    """See the module's docstring. ``epoch`` is 0 or this engine's own; ``capacity_bytes`` is the
    effective capacity. ``found_bytes`` and ``found_count`` are the amounts that all engines had
    stored at the start, and ``last_use_ns`` is the latest use among those records."""

    def __init__(
        self,
        path: Path,
        identity: Identity,
        capacity_bytes: int,
        is_own: bool,
        was_reset: bool = False,
    ) -> None:
        """``is_own``: this engine has other weights than those of the model's files.
        ``was_reset``: so had an exclusive tier that used the folder. Raises ``TierIoError`` and
        ``OSError``."""
        self.capacity_bytes = self._configured_bytes = capacity_bytes
        self._granted = 0
        self._lock = threading.Lock()
        self._publishing = 0
        self._turn = threading.Condition()  # guards the epoch and ``_publishing``
        self._resetting = threading.Lock()
        self._left: set[int] = set()  # epochs whose records this engine still has to remove
        with contextlib.ExitStack() as undo:
            prepare(path, allow_network=True)
            super().__init__(path, identity)
            undo.callback(super().close)
            self._take_over(was_reset)
            self.medium = self._stored_medium()
            self.engines = FolderEngines(self._fd, engine_name(), capacity_bytes)
            undo.callback(self.engines.close)
            self.epoch = COMMON
            self.engines.announce(COMMON)
            if is_own:
                self.begin_own(forgets=False)
            stored, _alive = self.scan()
            self.note_capacity(self.capacity_bytes)
            self.found_bytes, self.found_count = sum(s.size_bytes for s in stored), len(stored)
            self.last_use_ns = max((one.use_ns for one in stored), default=0)
            undo.pop_all()

    def _take_over(self, was_reset: bool) -> None:
        """Mark the folder as shared. Keeps the records of an exclusive tier. Raises ``FolderError``
        if that tier is open, or was reset: its records may belong to other weights. This holds for
        a marked folder as well, because earlier versions did not know of resets that had only
        begun."""
        if self._exists(EPOCH_NAME) and (was_reset or self._load(EPOCH_NAME) != "0"):
            raise FolderError(
                f"{self._path} was used by a tier that was not shared and that was reset. Remove "
                "it, or give another path"
            )
        if self._exists(SHARED_NAME):
            return
        if self._exists(LOCK_NAME) and _is_locked(self._path / LOCK_NAME):
            raise FolderError(f"{self._path} is in use by a tier that does not share it")
        self._store_once(SHARED_NAME, "1")

    def _stored_medium(self) -> str:
        if not self._exists(MEDIUM_NAME):
            self._store_once(MEDIUM_NAME, secrets.token_hex(16))
        return self._load(MEDIUM_NAME)

    def _store_once(self, name: str, text: str) -> None:
        """Store a small file unless another engine has just done so: ``link`` replaces nothing."""
        temporary = f"{name}.{secrets.token_hex(8)}.new"
        self._write_new(temporary, text)
        try:
            os.link(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except FileExistsError:
            pass
        except OSError:
            # a file system without links: the last writer wins, and all read its file afterwards
            self._publish(temporary, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)

    def _is_here(self) -> bool:
        try:
            return super()._is_here() and self.engines.are_here()
        except OSError as error:
            raise TierIoError(f"the folder {self._path} cannot be read: {error}") from error

    # -- records ---------------------------------------------------------------------------

    def store(self, key: Key, epoch: int, data: Buffer, use_ns: int, serial: int) -> WriteOutcome:
        """Write a record unless it exists or there is no space. Raises ``TierIoError``."""
        if epoch != self.epoch:  # after a reset, the record belongs to old weights
            return WriteOutcome.FAILED
        if self._is_there(key, epoch):
            return WriteOutcome.OK
        try:
            if not self._take_grant((1 + pages_for(data.nbytes)) * ALIGNMENT):
                return WriteOutcome.FULL
            self._make_epoch(epoch)
        except OSError:
            self.check()
            return WriteOutcome.FAILED
        return self.write(key, epoch, data, use_ns, f"{self.engines.name}.{serial}")

    def _is_there(self, key: Key, epoch: int) -> bool:
        try:
            return self._exists(self._record(key, epoch))
        except OSError:
            self.check()
            return False

    def are_there(self, keys: list[Key], epoch: int) -> list[bool]:
        """Return which records exist, without reading them. Raises ``TierIoError``."""
        return [self._is_there(key, epoch) for key in keys]

    def _make_epoch(self, epoch: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{PREFIX}{epoch}", 0o700, dir_fd=self._fd)

    def _publish_record(self, temporary: str, path: str, epoch: int) -> None:
        """Refuse after a reset, because another engine may have created the folder again for its
        records."""
        with self._turn:
            if epoch != self.epoch:
                raise OSError(errno.ESTALE, "a reset came in between")
            self._publishing += 1
        try:
            self._publish(temporary, path)
        finally:
            with self._turn:
                self._publishing -= 1
                self._turn.notify_all()

    def fetch(self, key: Key, epoch: int, into: Buffer) -> ReadOutcome:
        """Fill ``into`` from a record. A damaged record is removed. Raises ``TierIoError``."""
        path = self._record(key, epoch)
        try:
            fd = os.open(path, READ | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError:
            self.check()
            return ReadOutcome.MISS
        try:
            page, payload_bytes = self._read_whole(fd, into)
            if payload_bytes not in (None, into.nbytes):
                return ReadOutcome.CORRUPT
            if page is not None and verify(page, self._identity, key, epoch, into):
                self._note_read(fd)
                return ReadOutcome.OK
            return self._drop(path, fd)
        except OSError:
            self.check()
            return ReadOutcome.MISS
        finally:
            os.close(fd)

    @staticmethod
    def _note_read(fd: int) -> None:
        """Record a read as a use, but only now and then, and only if possible."""
        now_ns = time.time_ns()
        with contextlib.suppress(OSError):
            if now_ns - os.fstat(fd).st_mtime_ns > READ_USE_NS:
                os.utime(fd, ns=(now_ns, now_ns))

    @staticmethod
    def _read_whole(fd: int, into: Buffer) -> tuple[bytes | None, int | None]:
        """Return the header, if everything was read, and the payload's length according to the
        header."""
        page = os.read(fd, ALIGNMENT)
        try:
            payload_bytes = parse(page[:HEADER_BYTES]).payload_bytes
        except RecordError:
            return None, None
        done = 0
        while done < into.nbytes and payload_bytes == into.nbytes:
            count = os.readv(fd, [into[done:].data])
            if not count:
                return None, payload_bytes
            done += count
        return page[:HEADER_BYTES], payload_bytes

    def _drop(self, path: str, fd: int) -> ReadOutcome:
        """Remove a damaged record unless a new one has replaced it."""
        ours = os.fstat(fd)
        try:
            found = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return ReadOutcome.MISS
        if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=self._fd)
        return ReadOutcome.CORRUPT

    def entries(self, epoch: int) -> dict[Key, Entry]:
        """Return every record of an epoch, least recently used first. Reads every header."""
        try:
            return by_use(entry for _name, entry in self._entries_of(epoch) if entry is not None)
        except FileNotFoundError:
            return {}

    # -- the cap ---------------------------------------------------------------------------

    def _take_grant(self, size_bytes: int) -> bool:
        """Return True if this many bytes may be written now. Raises ``OSError``."""
        with self._lock:
            if self._granted < size_bytes and not self._make_space(size_bytes):
                return False
            self._granted -= size_bytes
            return True

    def _make_space(self, size_bytes: int) -> bool:
        """Evict until every live engine has space for a grant of at least ``size_bytes``, and take
        the grant. Returns False if that is impossible."""
        stored, alive = self.scan()
        share = max(GRANTS_MIN, GRANTS_EACH * alive)
        grant = max(self.capacity_bytes // share, size_bytes)
        limit = self.capacity_bytes - 2 * alive * grant
        if limit < 0:
            return False
        used = sum(one.size_bytes for one in stored)
        if used > limit:
            wanted = max(0, limit - int(self.capacity_bytes * EVICT_SHARE))
            for one in sorted(stored, key=lambda one: one.use_ns):
                if used <= wanted:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{one.folder}/{one.name}", dir_fd=self._fd)
                used -= one.size_bytes
        if used <= limit:
            self._granted = grant
        return used <= limit

    def scan(self) -> tuple[list[StoredFile], int]:
        """Return what all engines have stored and how many of them are alive. Removes what dead
        engines left unfinished. Raises ``OSError``."""
        engines = self.engines.all()
        for name in [name for name, alive in engines.items() if not alive]:
            self._remove_dead(name)
        alive = [name for name, alive in engines.items() if alive]
        announced = {name: self.engines.announced_by(name) for name in alive}
        self._agree_on_capacity(announced)
        claimed = {one.own_epoch for one in announced.values() if one is not None}
        stored: list[StoredFile] = []
        for folder in os.listdir(self._fd):
            match = _FOLDER.fullmatch(folder)
            if match or folder.startswith("gone-"):
                found, newest = self._scan_folder(folder)
                stored += found
                is_claimed = match is not None and (
                    None in announced.values() or int(match[1]) in {COMMON, self.epoch, *claimed}
                )
                if not is_claimed and self.engines.now_ns - newest > STRAY_NS:
                    self._retire(folder)
        return stored, max(1, len(alive))

    def _agree_on_capacity(self, announced: Mapping[str, Announced | None]) -> None:
        """Adopt the capacity of the live engine that joined first."""
        known = {
            name: one for name, one in announced.items() if one is not None and one.capacity_bytes
        }
        known[self.engines.name] = self.engines.announced
        first = min(known, key=lambda name: (known[name].joined_ns, name))
        capacity_bytes = known[first].capacity_bytes
        if capacity_bytes == self.capacity_bytes:
            return
        self.capacity_bytes, self._granted = capacity_bytes, 0
        if first == self.engines.name:
            logger.warning(
                "kvtiers: %s now has the capacity configured here, %d bytes, because the engines "
                "that used it before have left",
                *(self._path, capacity_bytes),
            )
        else:
            logger.warning(
                "kvtiers: %s is shared, and its capacity is that of the engine that joined first, "
                "%d bytes; the capacity configured here, %d bytes, has no effect while that engine "
                "uses the folder",
                *(self._path, capacity_bytes, self._configured_bytes),
            )

    def _scan_folder(self, folder: str) -> tuple[list[StoredFile], int]:
        """Return the files of one folder and the time of its last change."""
        stored: list[StoredFile] = []
        try:
            fd = os.open(folder, READ | os.O_DIRECTORY, dir_fd=self._fd)
        except FileNotFoundError:
            return stored, self.engines.now_ns
        try:
            newest = os.fstat(fd).st_mtime_ns
            with os.scandir(fd) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        found = file.stat(follow_symlinks=False)
                        match = _TEMPORARY.fullmatch(file.name)
                        if match and self._is_stray(match[1], found.st_mtime_ns):
                            os.unlink(file.name, dir_fd=fd)
                            continue
                        # A record that is being written counts as just used.
                        use_ns = self.engines.now_ns if match else found.st_mtime_ns
                        size = pages_for(found.st_size) * ALIGNMENT
                        stored.append(StoredFile(folder, file.name, size, use_ns))
        finally:
            os.close(fd)
        return stored, newest

    def _is_stray(self, engine: str, changed_ns: int) -> bool:
        """Return True if a temporary file will never be finished."""
        if self.engines.is_alive(engine):
            return False
        is_here = engine.startswith(self.engines.name[:13])
        return is_here or self.engines.now_ns - changed_ns > STRAY_NS

    def _remove_dead(self, engine: str) -> None:
        """Remove the files that only this dead engine used. Raises ``OSError``."""
        announced = self.engines.announced_by(engine)
        with contextlib.suppress(FileNotFoundError):  # another engine removed it first
            if announced is None and self.engines.silent_ns(engine) < STRAY_NS:
                return  # its content cannot be read now; a later scan tries again
        if announced is not None and announced.own_epoch != COMMON:
            self._retire(f"{PREFIX}{announced.own_epoch}")
        self.engines.forget(engine)

    # -- epochs ----------------------------------------------------------------------------

    def begin_own(self, *, forgets: bool = True) -> None:
        """Begin an epoch of this engine alone. If it ``forgets``, the records of the epoch that it
        leaves are gone for all engines: their folder is renamed as soon as no new record can get
        there. Durable. Raises ``OSError``; the caller then tries again, which also removes what
        failed attempts left."""
        own = secrets.randbits(62) | 1
        with self._resetting:
            if forgets:
                self._left.add(self.epoch)
            self.engines.announce(own)
            with self._turn:
                self.epoch = own
                self._turn.wait_for(lambda: not self._publishing)
            for epoch in self._left:
                self._retire(f"{PREFIX}{epoch}", remove=False)
            os.fsync(self._fd)
            self._left.clear()

    def _retire(self, folder: str, *, remove: bool = True) -> None:
        """Hide a folder's records from all engines and remove them."""
        name = folder if folder.startswith("gone-") else f"gone-{secrets.token_hex(8)}"
        if name != folder:
            try:
                os.rename(folder, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except FileNotFoundError:
                return
        if remove:
            with contextlib.suppress(OSError):
                self._remove_folder(name)

    def remove_gone(self) -> None:
        """Remove retired folders, as far as possible."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):
                if name.startswith("gone-"):
                    self._retire(name)

    def renew(self) -> None:
        """Declare that this engine is alive. Raises ``TierIoError``."""
        try:
            self.engines.touch()
        except OSError as error:
            raise TierIoError(f"the folder {self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the folder. Call it only when no thread uses it any more."""
        self.engines.close()
        super().close()


def _is_locked(path: Path) -> bool:
    """Return True if an exclusive tier of this machine holds the folder's lock."""
    file = LockFile(path, creates=False)
    try:
        return not try_flock(file.fd, fcntl.LOCK_SH)
    except OSError:
        return False  # a file system without locks: no process holds one
    finally:
        file.close()

"""Opening the folder of an LMDB tier: checks, recovery, quarantine.

    <folder>/owner.lock       the live owner's pid
    <folder>/data.mdb         the index (see ``lmdb_index``), preallocated
    <folder>/payload.data     page 0: magic, format, file id; then the records' places
    <folder>/quarantine-*     what could not be trusted, renamed

The index names the payload file by its id, so that neither is ever used with another's partner.
Everything here blocks and runs in one thread at a time, before the tier's threads exist or after
they ended.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import lmdb

from tiers import lmdb_index
from tiers.base import ALIGNMENT, Buffer, TierIoError
from tiers.codec import Codec, KeyRing
from tiers.direct_io import DiskIo, PayloadFile, Scratch
from tiers.folder import OwnerLock, prepare, quarantine, sync_folder
from tiers.lmdb_index import (
    INDEX_BYTES_MIN,
    RECORD_INDEX_BYTES,
    Changes,
    IndexUnusableError,
    Limits,
    LmdbIndex,
    Manifest,
    index_exists,
)
from tiers.record import NO_NAMESPACE, Identity
from tiers.recover import Expected, Recovered, recover

PAYLOAD_NAME = "payload.data"
SMALL_FILES_BYTES = 4 * ALIGNMENT
"""What the owner's lock and LMDB's table of readers take on the disk, with something to spare."""
JOB_BYTES_MIN = 256 << 10
_MAGIC = b"KVTPAYL1"
_ID_BYTES = 16


class Recovery(enum.Enum):
    """What to do with what an earlier run left.

    ``OFF``: start empty. ``QUIET``: keep what is whole, move aside what is not, go on.
    ``STRICT``: any damage found at open is a ``TierIoError`` and nothing is touched.
    """

    OFF = "off"
    QUIET = "quiet"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """How an LMDB tier works. Sizes in bytes.

    ``record_bytes`` is the smallest usual payload: the index gets room for
    ``capacity / record_bytes`` records. ``grow_bytes`` is the step in which the payload file takes
    its space; ``reserve_bytes`` of the file system stay free (``None``: 5 %, at least 2 GiB).
    ``io_threads`` is the queue depth, for reads and for writes each; a few more threads seal and
    verify meanwhile. ``job_bytes`` is the most that
    one thread moves at a time, adjacent records with one system call; a call is divided among all
    threads first. Small jobs cost CPU: threads that hand over to each other all the time.
    ``queue_records`` bounds what waits.
    ``key_file`` turns encryption on, ``compress`` compression (see ``codec``).
    """

    namespace: bytes = NO_NAMESPACE
    rank: int = 0
    epoch: int = 0
    recovery: Recovery = Recovery.QUIET
    record_bytes: int = 64 << 10
    grow_bytes: int = 1 << 30
    reserve_bytes: int | None = None
    io_threads: int = 8
    job_bytes: int = 8 << 20
    queue_records: int = 4096
    direct_io: bool = True
    key_file: str = ""
    compress: bool = False
    allow_network: bool = False
    close_timeout_s: float = 30.0


def job_bytes(options: LmdbOptions, total_bytes: int) -> int:
    """How much goes into one job: all threads get some, small records go together."""
    share = total_bytes // options.io_threads
    return min(options.job_bytes, max(JOB_BYTES_MIN, share))


def index_bytes(capacity_bytes: int, record_bytes: int) -> int:
    """The part of a capacity that the index takes (its file is preallocated)."""
    records = -(-capacity_bytes // record_bytes)
    pages = max(INDEX_BYTES_MIN, records * RECORD_INDEX_BYTES) // ALIGNMENT
    return pages * ALIGNMENT


def payload_capacity_bytes(capacity_bytes: int, record_bytes: int = 64 << 10) -> int:
    """What is left of a capacity for records: all but the index, page 0 and small files.

    Raises ``ValueError`` if that is nothing.
    """
    left = capacity_bytes - index_bytes(capacity_bytes, record_bytes) - ALIGNMENT
    left -= SMALL_FILES_BYTES
    if left < ALIGNMENT:
        raise ValueError(
            f"a capacity of {capacity_bytes} bytes leaves no room for records: the index takes "
            f"{index_bytes(capacity_bytes, record_bytes)}. Give more"
        )
    return left // ALIGNMENT * ALIGNMENT


class Ending(Protocol):
    """Threads that use a store's files."""

    def stop(self) -> None:
        """Finish what is queued and end. Blocks."""


class LmdbStore:
    """The open files of one tier."""

    def __init__(self, folder: Path, capacity_bytes: int, options: LmdbOptions, io: DiskIo) -> None:
        """Open or create. Raises ``TierIoError``."""
        self._folder = folder
        self._options = options
        self._io = io
        self._identity = Identity(options.namespace, options.rank)
        self._capacity_bytes = capacity_bytes
        payload_capacity_bytes(capacity_bytes, options.record_bytes)  # or a ValueError
        self.quarantined: Path | None = None
        self.quarantine_reason = ""
        self.codec = make_codec(self._identity, options)
        prepare(folder, allow_network=options.allow_network)
        self._lock = OwnerLock(folder)
        try:
            self._open()
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError | lmdb.Error):
                raise TierIoError(f"cannot open the tier in {folder}: {error}") from error
            raise

    def _open(self) -> None:
        try:
            self._open_files()
        except IndexUnusableError as error:
            if self._options.recovery is Recovery.STRICT:
                raise TierIoError(
                    f"the tier in {self._folder} is damaged: {error}. Use recovery "
                    '"quiet" to move the files aside and start empty'
                ) from error
            self._set_aside(str(error))
            try:
                self._open_files()
            except IndexUnusableError as again:
                raise TierIoError(f"cannot create a tier in {self._folder}: {again}") from again

    def _open_files(self) -> None:
        is_new = not index_exists(self._folder)
        self._divide_capacity()
        file_id = secrets.token_hex(_ID_BYTES)
        path = self._folder / PAYLOAD_NAME
        with contextlib.ExitStack() as undo:
            if is_new:
                if is_foreign(path):
                    raise IndexUnusableError(f"{path} is not ours")
                self._open_payload(path, undo)
                write_id(self.file, file_id)
                sync_folder(self._folder)
            manifest = Manifest(self._identity, file_id)
            self.index = LmdbIndex(self._folder, self._index_bytes, manifest)
            undo.callback(self.index.close)
            if not is_new:
                if is_foreign(path) or read_id(path) != self.index.manifest.file_id:
                    raise IndexUnusableError(f"{path} is not the payload file of this index")
                self._open_payload(path, undo)
            self._recover()
            self.index.note_limits(Limits(self._capacity_bytes, self._options.record_bytes))
            undo.pop_all()

    def _divide_capacity(self) -> None:
        """Among index and payloads. An index made for a larger capacity keeps its size."""
        self._index_bytes = index_bytes(self._capacity_bytes, self._options.record_bytes)
        path = self._folder / lmdb_index.DATA_NAME
        if os.path.lexists(path):
            size = path.lstat().st_size // ALIGNMENT * ALIGNMENT
            self._index_bytes = max(self._index_bytes, size)
        left = self._capacity_bytes - self._index_bytes - SMALL_FILES_BYTES
        self.pages_max = left // ALIGNMENT
        if self.pages_max < 2:
            raise IndexUnusableError(
                f"an index of {self._index_bytes} bytes leaves no room for records in a capacity "
                f"of {self._capacity_bytes}"
            )
        self.records_max = self._index_bytes // RECORD_INDEX_BYTES

    def _open_payload(self, path: Path, undo: contextlib.ExitStack) -> None:
        options = self._options
        depth = options.io_threads
        self.file = PayloadFile(path, self._io, direct=options.direct_io, depth=depth)
        undo.callback(self.file.close)

    def _recover(self) -> None:
        limit = min(self.file.size_bytes // ALIGNMENT, self.pages_max)
        epoch = self.found_epoch = self.index.epoch
        if self._options.recovery is Recovery.OFF or self._options.epoch > epoch:
            # Never beyond the caller's epoch: whoever keeps the epoch would bump it in vain later.
            self.index.apply(Changes(clear_to_epoch=max(self._options.epoch, epoch)))
        expected = Expected(self._identity, self.index.epoch, limit, self.codec.key_ids)
        found = recover(self.index.tables(), expected)
        if found.bad and self._options.recovery is Recovery.STRICT:
            raise IndexUnusableError(f"{len(found.bad)} records are not whole or not ours")
        if found.bad:
            self.index.apply_in_parts(Changes(edits=dict.fromkeys(found.bad)))
        if self.file.size_bytes > self.pages_max * ALIGNMENT:
            self.file.truncate(self.pages_max * ALIGNMENT)
        self.file_pages = max(limit, 1)
        self.recovered: Recovered = found

    def _set_aside(self, reason: str) -> None:
        """Quarantine the index, and the payload file unless it is ours and thus reusable."""
        names = list(lmdb_index.FILES)
        if is_foreign(self._folder / PAYLOAD_NAME):
            names.append(PAYLOAD_NAME)
        self.quarantined = quarantine(self._folder, names)
        self.quarantine_reason = reason

    def grow(self, pages: int) -> int:
        """Lengthen the payload file by at least ``pages`` if the reserve allows; the pages
        gained (0: none). Blocks. Raises ``OSError``."""
        reserve = reserve_bytes(self.file, self._options.reserve_bytes)
        room = (self.file.free_bytes - reserve) // ALIGNMENT
        wanted = max(pages, self._options.grow_bytes // ALIGNMENT)
        gain = min(wanted, self.pages_max - self.file_pages, room)
        if gain < pages:
            return 0
        self.file.grow((self.file_pages + gain) * ALIGNMENT)
        self.file_pages += gain
        return gain

    def close(self, *threads: Ending) -> None:
        """Release everything once these threads have ended, however long they hang. Blocks."""
        for each in threads:
            each.stop()
        try:
            self.index.close()
            self.file.close()
        finally:
            self._lock.release()


def reserve_bytes(file: PayloadFile, configured: int | None) -> int:
    """What must stay free of the file system; unless configured 5 %, at least 2 GiB."""
    if configured is not None:
        return configured
    found = os.fstatvfs(file.fd)
    return max(2 << 30, found.f_blocks * found.f_frsize // 20)


def make_codec(identity: Identity, options: LmdbOptions) -> Codec:
    """Raises ``TierIoError`` for a key file or a package that is not there."""
    keys = KeyRing.load(Path(options.key_file), identity.namespace) if options.key_file else None
    try:
        return Codec(identity, keys=keys, compress=options.compress)
    except ImportError as error:
        raise TierIoError(
            "compression needs the package zstandard. Run: pip install kvtiers[compress]"
        ) from error


def _first_page(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, len(_MAGIC) + _ID_BYTES, 0)
    finally:
        os.close(fd)


def is_foreign(path: Path) -> bool:
    """Whether something lies there that this tier did not make."""
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_file():
        return True
    return path.stat().st_size > 0 and not _first_page(path).startswith(_MAGIC)


def read_id(path: Path) -> str:
    """The id of a payload file; empty if there is none."""
    return _first_page(path)[len(_MAGIC) :].hex() if path.exists() else ""


def write_id(file: PayloadFile, file_id: str) -> None:
    """Make page 0, durable. The rest of the file keeps its blocks, and means nothing now."""
    page: Buffer = Scratch(ALIGNMENT).at_least(ALIGNMENT)
    raw = _MAGIC + bytes.fromhex(file_id)
    page[: len(raw)] = memoryview(raw)
    file.grow(ALIGNMENT)
    file.write([page], 0)
    file.sync()

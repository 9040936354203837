"""The index of an LMDB tier: the location of each record, in one LMDB environment.

The environment has two named databases:

    meta      b"manifest" -> JSON; b"epoch" -> 8 bytes, little-endian; b"limits" -> JSON
    records   key -> last use (8 bytes, big-endian) + record header + extents (start u64, pages u32)

It contains no payloads. Values are small, and every transaction is short, including those of
readers in other processes (``offline.lmdb_reader``), so LMDB can reuse pages at once and the file
does not outgrow its map. A reader that was killed in a transaction would block the reuse of pages
forever; ``apply`` regularly clears the slots of such readers. The file is preallocated to the size
of the map, so that a full disk cannot fail a commit, and its length is checked, because with a
shorter file LMDB would kill the process by SIGBUS.

Opening never trusts a file, even one that was closed cleanly. Before LMDB opens it,
``recovery.walk`` checks all of its pages (LMDB dies by SIGBUS on a truncated file and on garbled
pages) and reads the records in the same pass. A file that the walk rejects goes to LMDB's own, slow
verifier. Any damage raises ``IndexUnusableError``; the caller decides what to do.

Ownership: one thread at a time, except for ``keys_after``. A transaction never outlives the method
that began it, and no memory of LMDB is used after its transaction.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
from lmdb.verify import VerifyError, verify

from tiers.base import ALIGNMENT, Key
from tiers.folders.folder import FolderUnusableError
from tiers.io.extents import Extent, Extents
from tiers.lmdb.records.record_table import (
    EXTENT_BYTES,
    EXTENTS_AT,
    USE_BYTES,
    RecordTable,
    tables_of,
)
from tiers.lmdb.recovery.pages import DamagedError, UnsoundError
from tiers.lmdb.recovery.walk import walk
from tiers.record import Identity


def check_space(path: Path, map_bytes: int) -> None:
    """Raise ``OSError`` if the disk has no space for an index of ``map_bytes``. Call this before
    allocating: a failed allocation would temporarily fill the disk. Folders may be missing."""
    size_bytes = path.stat().st_size if path.exists() else 0
    disk = os.statvfs(next(above for above in path.absolute().parents if above.exists()))
    free_bytes = disk.f_bavail * disk.f_frsize
    if map_bytes - size_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the index for this capacity takes {map_bytes:,} bytes, and only {free_bytes:,} "
            "bytes of the disk are free. Configure a smaller capacity",
        )


class IndexFile:
    """The preallocated file of an index. ``path`` exists once LMDB has opened its environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reserved: os.stat_result | None = None
        self._size_bytes = 0

    def reserve(self, map_bytes: int) -> None:
        """Allocate the blocks of the file. Raises ``OSError``; the file keeps its length then."""
        check_space(self.path, map_bytes)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            size = found.st_size
            if size < map_bytes:
                try:
                    os.posix_fallocate(fd, size, map_bytes - size)
                except OSError:
                    # otherwise the blocks allocated so far would remain allocated
                    os.ftruncate(fd, size)
                    raise
        finally:
            os.close(fd)
        self._reserved, self._size_bytes = found, max(size, map_bytes)

    def check(self) -> None:
        """Raise ``OSError`` if the file was truncated, removed or replaced after it was reserved.
        A removed file takes disk space that nobody sees, and other processes do not use it."""
        found = os.stat(self.path)
        if self._reserved is not None and not os.path.samestat(found, self._reserved):
            raise OSError(f"{self.path} was replaced while in use")
        if found.st_size < self._size_bytes:
            raise OSError(f"{self.path} was truncated while in use")


logger = logging.getLogger(__name__)

FORMAT = 1
DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
FILES = (DATA_NAME, LOCK_NAME)
RECORDS_NAME = b"records"
RECORD_INDEX_BYTES = 512
"""Index space reserved per record; a record takes 280 to 320 bytes, also under churn."""
INDEX_BYTES_MIN = 2 << 20
READER_CHECK_EVERY = 64
"""Number of transactions between checks for killed readers. A check takes microseconds."""

_PAYLOAD_AT = USE_BYTES + 24
_PAGES_AT = EXTENTS_AT + 8
EXTENT = struct.Struct("<QI")
assert EXTENT.size == EXTENT_BYTES, "the layout of an extent"

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


class IndexUnusableError(FolderUnusableError):
    """Raised if the index, or a file beside it, cannot be used. The message says why."""


class WrongIdentityError(IndexUnusableError):
    """Raised for an intact index of another namespace, rank or format."""


def pack_value(use: int, header: bytes, extents: Extents) -> bytes:
    """Encode the value of one record."""
    packed = b"".join(EXTENT.pack(start, pages) for start, pages in extents)
    return use.to_bytes(USE_BYTES, "big") + header + packed


def header_of(value: bytes) -> bytes:
    """Return the record's header."""
    return value[USE_BYTES:EXTENTS_AT]


def payload_bytes_of(value: bytes) -> int:
    """Return the length of the record's payload."""
    return int.from_bytes(value[_PAYLOAD_AT : _PAYLOAD_AT + 8], "little")


def start_of(value: bytes) -> int:
    """Return the first page of the record's stored bytes."""
    return int.from_bytes(value[EXTENTS_AT:_PAGES_AT], "little")


def extents_of(value: bytes) -> Extents:
    """Return the extents that contain the record's stored bytes."""
    if len(value) == EXTENTS_AT + EXTENT_BYTES:  # the usual case
        return (Extent._make(EXTENT.unpack_from(value, EXTENTS_AT)),)
    return tuple(
        Extent(*EXTENT.unpack_from(value, at)) for at in range(EXTENTS_AT, len(value), EXTENT_BYTES)
    )


@dataclass(slots=True)
class Changes:
    """The changes of one transaction: first the clear, then the edits (``None`` deletes a key)."""

    clear_to_epoch: int | None = None
    edits: dict[Key, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of the index, which is stored in it."""

    identity: Identity
    file_id: str

    def dump(self) -> bytes:
        fields = {
            "format": FORMAT,
            "namespace": self.identity.namespace.hex(),
            "rank": self.identity.rank,
            "page_bytes": ALIGNMENT,
            "file_id": self.file_id,
        }
        return json.dumps(fields).encode()

    @classmethod
    def load(cls, raw: bytes) -> Manifest:
        """Decode a manifest. Raises ``IndexUnusableError``."""
        try:
            fields = json.loads(raw)
            if fields["format"] != FORMAT or fields["page_bytes"] != ALIGNMENT:
                raise WrongIdentityError(
                    f"format {fields['format']} with pages of {fields['page_bytes']} bytes, "
                    f"expected {FORMAT} and {ALIGNMENT}"
                )
            identity = Identity(bytes.fromhex(fields["namespace"]), int(fields["rank"]))
            return cls(identity, str(fields["file_id"]))
        except (ValueError, KeyError, TypeError) as error:
            raise IndexUnusableError(f"the manifest is not readable: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity with which an index was last opened, and the smallest usual payload, in
    bytes."""

    capacity_bytes: int
    record_bytes: int

    def dump(self) -> bytes:
        return json.dumps([self.capacity_bytes, self.record_bytes]).encode()

    @classmethod
    def load(cls, raw: bytes | None) -> Limits | None:
        """Decode limits; ``None`` if nothing readable was stored."""
        try:
            capacity_bytes, record_bytes = json.loads(raw or b"")
            return cls(int(capacity_bytes), int(record_bytes))
        except (ValueError, TypeError):
            return None


def index_exists(folder: Path) -> bool:
    """Return True if the folder contains an index to recover from."""
    path = folder / DATA_NAME
    return os.path.lexists(path) and path.lstat().st_size > 0


class LmdbIndex:
    """The open LMDB environment."""

    def __init__(
        self, folder: Path, map_bytes: int, manifest: Manifest, *, is_checked: bool = False
    ) -> None:
        """Open or create. ``manifest`` is written to a new index; an existing index must have the
        same identity. ``is_checked``: the caller has called ``check_file``, and no process has
        written to the index since. Raises ``IndexUnusableError`` with the data unchanged, or
        ``OSError``."""
        self._file = IndexFile(folder / DATA_NAME)
        is_new = not index_exists(folder)
        self._found = None if is_new or is_checked else check_file(folder)
        self._transactions = 0
        check_space(folder / DATA_NAME, map_bytes)
        with contextlib.ExitStack() as undo:
            if is_new:  # half an index would count as damaged
                undo.callback(_remove, folder)
            self._env = self._open_env(folder, map_bytes)
            undo.callback(self._env.close)
            try:
                self._meta = self._env.open_db(b"meta")
                self._records = self._env.open_db(RECORDS_NAME)
                if is_new:
                    self._create(manifest)
                self.manifest, self.epoch = self._read_meta()
                check_owner(self.manifest.identity, manifest.identity)
                self._file.reserve(self._env.info()["map_size"])
            except BaseException as error:  # on any error, undo closes the environment
                raise _translated(error) from error
            undo.pop_all()

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    @staticmethod
    def _open_env(folder: Path, map_bytes: int) -> Any:
        try:
            env = lmdb.open(
                str(folder),
                map_size=map_bytes,
                mode=0o600,
                max_dbs=2,
                max_readers=16,
                readahead=False,
                writemap=False,
            )
        except lmdb.Error as error:
            raise _translated(error) from error
        env.reader_check()
        return env

    def _create(self, manifest: Manifest) -> None:
        with self._env.begin(write=True, db=self._meta) as txn:
            txn.put(b"manifest", manifest.dump())
            txn.put(b"epoch", bytes(8))

    def _read_meta(self) -> tuple[Manifest, int]:
        with self._env.begin(db=self._meta) as txn:
            raw, epoch = txn.get(b"manifest"), txn.get(b"epoch")
        if raw is None or epoch is None:
            raise IndexUnusableError("it has no manifest")
        return Manifest.load(bytes(raw)), int.from_bytes(epoch, "little")

    def tables(self) -> list[RecordTable]:
        """Return every record, for recovery at open."""
        found, self._found = self._found, None
        if found is not None:
            return found
        with self._env.begin(db=self._records) as txn, txn.cursor() as cursor:
            return tables_of(cursor.iternext())

    def keys_after(self, key: Key | None, count: int) -> list[Key]:
        """Return the next ``count`` keys after ``key``, which need not exist (``None``: from the
        first key on). Uses a separate transaction, so it may run concurrently with everything
        except ``close``. Raises ``OSError`` and ``lmdb.Error``."""
        self._file.check()
        with self._env.begin(db=self._records) as txn, txn.cursor() as cursor:
            found = cursor.first() if key is None else cursor.set_range(key)
            if found and cursor.key() == key:
                found = cursor.next()
            return list(islice(cursor.iternext(values=False), count)) if found else []

    def apply(self, changes: Changes) -> None:
        """Commit the changes, durable on return. Raises ``lmdb.MapFullError`` with nothing changed,
        and any other ``lmdb.Error`` or ``OSError`` with the state on disk unknown."""
        self._file.check()
        self._found = None
        records = self._records
        self._transactions += 1
        if not self._transactions % READER_CHECK_EVERY:
            self._env.reader_check()
        with self._env.begin(write=True) as txn:
            if changes.clear_to_epoch is not None:
                txn.drop(records, delete=False)
                txn.put(b"epoch", changes.clear_to_epoch.to_bytes(8, "little"), db=self._meta)
            for key, value in changes.edits.items():
                if value is None:
                    txn.delete(key, db=records)
                else:
                    txn.put(key, value, db=records)
        if changes.clear_to_epoch is not None:
            self.epoch = changes.clear_to_epoch

    def apply_in_parts(self, changes: Changes) -> None:
        """Like ``apply``, for edits that add no keys and need not be atomic. If the map has no
        space for copies of all pages that the edits change, they are committed in several
        transactions."""
        try:
            self.apply(changes)
        except lmdb.MapFullError:
            edits = list(changes.edits.items())
            half = (len(edits) + 1) // 2
            if changes.clear_to_epoch is not None or half == len(edits):
                raise
            self.apply_in_parts(Changes(edits=dict(edits[:half])))
            self.apply_in_parts(Changes(edits=dict(edits[half:])))

    def note_limits(self, limits: Limits) -> None:
        """Store the limits with which this index was opened. Commands that inspect the index read
        them."""
        with self._env.begin(db=self._meta) as txn:
            known = txn.get(b"limits")
        if known != limits.dump():
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"limits", limits.dump())

    def state(self) -> bytes | None:
        """Return the state that processes sharing the index store in it (``lmdb.shared.index``)."""
        with self._env.begin(db=self._meta) as txn:
            found = txn.get(b"state")
        return None if found is None else bytes(found)

    def close(self) -> None:
        """Release the files."""
        self._env.close()


def check_owner(found: Identity, expected: Identity) -> None:
    """Raise ``WrongIdentityError`` unless the records are those of this namespace and rank."""
    if found != expected:
        raise WrongIdentityError(
            f"its records belong to namespace {found.namespace.hex()} rank {found.rank}"
        )


def _remove(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def _translated(error: BaseException) -> BaseException:
    """Turn damage into ``IndexUnusableError`` and other errors of LMDB into ``OSError``: an intact
    index must not be discarded because the disk is full or failing."""
    if isinstance(error, _DAMAGE):
        return IndexUnusableError(f"LMDB cannot open it: {error}")
    return OSError(f"LMDB: {error}") if isinstance(error, lmdb.Error) else error


def check_file(folder: Path) -> list[RecordTable] | None:
    """Return the records if LMDB can read the file safely, or ``None`` if the file is safe but only
    LMDB can read its records.

    Raises ``IndexUnusableError`` if LMDB cannot read it safely. No process may write to the index
    during the call.
    """
    path = folder / DATA_NAME
    found = path.lstat()
    if not path.is_file() or path.is_symlink():
        raise IndexUnusableError("it is not a regular file")
    if found.st_size % ALIGNMENT or found.st_size < 2 * ALIGNMENT:
        raise IndexUnusableError(f"it has {found.st_size} bytes, which is not a complete index")
    try:
        return walk(path, RECORDS_NAME)
    except DamagedError as error:
        raise IndexUnusableError(f"it is damaged: {error}") from error
    except UnsoundError as error:
        logger.info("kvtiers: %s: %s; LMDB's verifier decides", path, error)
    try:
        problems: Sequence[object] = verify(str(folder))
    except (VerifyError, struct.error, IndexError) as error:
        raise IndexUnusableError(f"it is not an LMDB file: {error}") from error
    if problems:
        raise IndexUnusableError(f"{len(problems)} structural faults, first: {problems[0]}")
    return None

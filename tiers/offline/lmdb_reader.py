"""Reads the folder of an LMDB tier from another process. See ``offline_folder`` for the
guarantees.

LMDB supports several processes: this one opens the environment read-only, with a slot in the reader
table, so that no page is reused while it is being read. Because readers prevent reuse, a
transaction lasts for one batch of keys (a few milliseconds), never for the whole listing, and no
payload is read inside one.

The payload file is opened separately, for reading, without the page cache where possible. If the
owner moves the files aside, they stay open here, and every lookup raises ``FolderChangedError``.

An index without a running owner is checked as its tier would check it, because some damage would
crash LMDB. The check takes seconds for tens of millions of records.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from tiers.base import Buffer, Key
from tiers.io.codec import Codec, KeyRing
from tiers.io.direct_io import DiskIo, PayloadFile, Scratch
from tiers.lmdb.folder import PAYLOAD_NAME, check_partner, is_new
from tiers.lmdb.index import (
    DATA_NAME,
    LOCK_NAME,
    IndexUnusableError,
    Limits,
    Manifest,
    check_file,
    extents_of,
)
from tiers.lmdb.io_jobs import ReadItem, ReadJob
from tiers.lmdb.records.record_table import EXTENT_BYTES, EXTENTS_AT, USE_BYTES
from tiers.lmdb.shared.index import READERS_MAX, epoch_of, is_common
from tiers.offline.offline_folder import FolderChangedError, ListedRecord
from tiers.record import DATED_FROM_NS, ENCRYPTED, KEY_ID_BYTES, PREFIX_BYTES, Identity

_FIELDS = struct.Struct("<8s5xB18xQQ")
"""Time of last use, and fields of the header (``record``): flags, payload and stored length."""
_KEY_ID = slice(PREFIX_BYTES - KEY_ID_BYTES, PREFIX_BYTES)
"""The id of the encryption key in a record's mark, which begins with the header."""
_NOT_OF_THE_INDEX = (lmdb.DiskError, lmdb.LockError, lmdb.MemoryError, lmdb.ReadersFullError)
SCANNED_AT_ONCE = 2048
"""Number of keys per transaction, which takes about 2 ms."""


class LmdbReader:
    """An ``OfflineFolder`` over an LMDB tier. See the module's docstring."""

    kind = "lmdb"

    def __init__(self, folder: Path, *, is_owned: bool, key_file: str = "") -> None:
        """Raises ``IndexUnusableError``, ``OSError``, and ``TierIoError`` for a bad key file."""
        self.folder = folder
        self._path = folder / DATA_NAME
        _check_user(folder)
        if not is_owned:
            if is_new(folder):
                raise IndexUnusableError("nothing has been stored yet")
            check_file(folder)
        *self._inode, _ = _seen(self._path)
        self._length = 0
        try:
            with contextlib.ExitStack() as undo:
                self._env = _open(folder)
                undo.callback(self._env.close)
                self._length = _checked_length(self._path, self._env)
                self._meta = self._env.open_db(b"meta", create=False)
                self._records = self._env.open_db(b"records", create=False)
                check_partner(folder, self._read_meta())
                self._file = PayloadFile(folder / PAYLOAD_NAME, DiskIo(), read_only=True)
                undo.callback(self._file.close)
                keys = KeyRing.load(Path(key_file), self.owner.namespace) if key_file else None
                self._key_ids = frozenset(keys.ciphers if keys else ())
                self._codec = Codec(self.owner, keys=keys, compress=False)
                undo.pop_all()
        except lmdb.ReadonlyError as error:  # LMDB raises this error for EACCES
            raise PermissionError(
                f"this user can read {folder}, but cannot write {folder / LOCK_NAME}, in which "
                "LMDB enters each reader. Run this as the user that the server runs as"
            ) from error
        except _NOT_OF_THE_INDEX as error:
            raise OSError(f"LMDB: {error}") from error
        except lmdb.Error as error:
            raise IndexUnusableError(f"LMDB cannot open it: {error}") from error
        self._scratch = Scratch()

    def _read_meta(self) -> Manifest:
        with self._begin(self._meta) as txn:
            manifest, limits = txn.get(b"manifest"), txn.get(b"limits")
            self.epoch = int.from_bytes(txn.get(b"epoch") or b"", "little")
            self.is_shared = is_common(txn.get(b"state"), self.epoch)
        if manifest is None:
            raise IndexUnusableError("it has no manifest")
        known = Manifest.load(bytes(manifest))
        self.owner: Identity = known.identity
        self.limits = Limits.load(limits)
        self.capacity_bytes = self.limits.capacity_bytes if self.limits else 0
        return known

    @property
    def file_bytes(self) -> int:
        """Bytes of both files, as allocated."""
        return os.stat(self._path).st_blocks * 512 + os.fstat(self._file.fd).st_blocks * 512

    @contextlib.contextmanager
    def _begin(self, database: Any) -> Iterator[Any]:
        """Begin a short read transaction on the current index."""
        *inode, length = _seen(self._path)
        if inode != self._inode:
            raise FolderChangedError(f"{self.folder} was replaced by its owner")
        if length < self._length:  # an access to a missing page would kill this process
            raise FolderChangedError(f"the index in {self.folder} was truncated")
        try:
            with self._env.begin(db=database) as txn:
                yield txn
        except lmdb.MapResizedError as error:
            raise FolderChangedError(f"{self.folder} was opened with another capacity") from error

    def count(self) -> int:
        with self._begin(self._records) as txn:
            return int(txn.stat(self._records)["entries"])

    def batches(self) -> Iterator[list[ListedRecord]]:
        last: bytes | None = None
        while True:
            with self._begin(self._records) as txn, txn.cursor() as cursor:
                self._read_epoch(txn)
                there = cursor.first() if last is None else cursor.set_range(last)
                if there and cursor.key() == last:
                    there = cursor.next()
                items = list(itertools.islice(cursor.iternext(), SCANNED_AT_ONCE)) if there else []
            if not items:
                return
            last = items[-1][0]
            # Sorted by extents, so that reading this batch passes through the file once.
            count = len(items)
            items = sorted((item for item in items if self._is_current(item[1])), key=_first_page)
            yield [_listed(key, value) for key, value in items]
            if count < SCANNED_AT_ONCE:
                return

    def find(self, key: Key) -> ListedRecord | None:
        with self._begin(self._records) as txn:
            self._read_epoch(txn)
            value = txn.get(key)
        return _listed(key, value) if value is not None and self._is_current(value) else None

    def _is_current(self, value: bytes) -> bool:
        """Return True if a record is of this epoch. A shared tier may contain records of engines
        with other weights; only those engines may use them, so they are not listed."""
        return not self.is_shared or epoch_of(value) == self.epoch

    def _read_epoch(self, txn: Any) -> None:
        self.epoch = int.from_bytes(txn.get(b"epoch", db=self._meta) or b"", "little")

    def can_decrypt(self, found: ListedRecord) -> bool:
        return not found.is_sealed or found.mark[_KEY_ID] in self._key_ids

    def load(self, found: Sequence[ListedRecord], into: Sequence[Buffer]) -> list[bool]:
        items = [
            ReadItem(one.key, bytes(USE_BYTES) + one.mark, _extents(one), data, position)
            for position, (one, data) in enumerate(zip(found, into, strict=True))
        ]
        job = ReadJob(items, self.epoch, self._codec, self._file)
        job.run(self._scratch)
        return [is_intact for _, is_intact in job.results()]

    def close(self) -> None:
        """Idempotent."""
        self._env.close()
        self._file.close()


def _listed(key: bytes, value: bytes) -> ListedRecord:
    """Decode one entry of the index; the fields are zero if kvtiers did not write it."""
    if len(value) < EXTENTS_AT or (len(value) - EXTENTS_AT) % EXTENT_BYTES:
        return ListedRecord(key, 0, 0, 0, False, value[USE_BYTES:])
    use, flags, payload_bytes, stored_bytes = _FIELDS.unpack_from(value)
    use_ns = int.from_bytes(use, "big")
    return ListedRecord(
        key,
        use_ns if use_ns >= DATED_FROM_NS else 0,
        payload_bytes,
        stored_bytes,
        flags & ENCRYPTED != 0,
        value[USE_BYTES:],
    )


def _first_page(item: tuple[bytes, bytes]) -> bytes:
    """Return the first page of a record as bytes that sort in the same order as the page
    numbers."""
    return item[1][EXTENTS_AT + 7 : EXTENTS_AT - 1 : -1]


def _extents(found: ListedRecord) -> Any:
    return extents_of(bytes(USE_BYTES) + found.mark)


def _seen(path: Path) -> tuple[int, int, int]:
    """Return device, inode and length of a file; zeros if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0, 0)
    return found.st_dev, found.st_ino, found.st_size


def _check_user(folder: Path) -> None:
    """Raise an error instead of creating LMDB's lock file in another user's folder: that user could
    not open it."""
    user = os.stat(folder).st_uid
    if user != os.geteuid() and not (folder / LOCK_NAME).exists():
        raise PermissionError(f"{folder} belongs to user {user}: run this as that user")


def _open(folder: Path) -> Any:
    env = lmdb.open(
        str(folder),
        readonly=True,
        create=False,
        max_dbs=2,
        max_readers=READERS_MAX,
        readahead=False,
        mode=0o600,
    )
    env.reader_check()  # frees the slots of killed readers
    return env


def _checked_length(path: Path, env: Any) -> int:
    """Return the file's length. If its last page is missing, the first access to that page would
    kill this process."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    found = os.stat(path).st_size
    if found < needed:
        raise IndexUnusableError(f"it has {found} bytes of {needed}")
    return found

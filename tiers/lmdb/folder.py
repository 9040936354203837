"""The files in the folder of an LMDB tier, exclusive or shared.

    <folder>/data.mdb         the index (see ``lmdb.index``), preallocated
    <folder>/payload.data     page 0: magic, format, file id; then the extents of records
    <folder>/quarantine-*     files that could not be trusted, renamed

The index names the payload file by its id, so that the two are only used together. A capacity
covers both files. Every function here blocks, and they run in one thread at a time.

``is_new``, ``check_partner`` and ``lmdb.index.check_file`` check the files. A tier that opens the
folder and a command that only inspects it (``offline.lmdb_reader``) call the same three functions,
so that an inspection predicts the result of an open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiers.base import ALIGNMENT, Buffer, TierIoError
from tiers.folders.folder import quarantine, sync_folder
from tiers.io.direct_io import DiskIo, PayloadFile, Scratch, pages_for
from tiers.lmdb import index as lmdb_index
from tiers.lmdb.index import (
    INDEX_BYTES_MIN,
    Changes,
    IndexUnusableError,
    Limits,
    LmdbIndex,
    Manifest,
    index_exists,
)
from tiers.lmdb.recovery.recover import Expected, Recovered, recover
from tiers.record import Identity

logger = logging.getLogger(__name__)

PAYLOAD_NAME = "payload.data"
_MAGIC = b"KVTPAYL1"
_ID_BYTES = 16
_NO_ID = "0" * (2 * _ID_BYTES)


# -- opening -------------------------------------------------------------------------------


def open_or_quarantine(folder: Path, open_files: Callable[[], None], *, strict: bool) -> bool:
    """Call ``open_files``. If it raises ``IndexUnusableError``, move the index aside, and the
    payload file too unless kvtiers wrote it, and call it again to begin empty. A payload file of
    ours stays and its blocks are reused, so the index that was moved aside is worthless. Returns
    True if files were moved aside.

    With ``strict``, nothing is changed, and the error becomes a ``TierIoError``.
    """
    try:
        open_files()
    except IndexUnusableError as error:
        if strict:
            raise TierIoError(
                f"the tier in {folder} is damaged: {error}. Use recovery "
                '"quiet" to move the files aside and start empty'
            ) from error
        why = str(error)
    else:
        return False
    names, path = list(lmdb_index.FILES), folder / PAYLOAD_NAME
    if is_not_ours(path):
        names.append(PAYLOAD_NAME)
    aside = quarantine(folder, names)
    if path.exists():
        _write_first_page(path, _MAGIC + bytes(_ID_BYTES))
    logger.warning(
        "kvtiers: the tier in %s begins empty: %s. Its files were moved to %s",
        *(folder, why, aside.name),
    )
    try:
        open_files()
    except IndexUnusableError as error:
        raise TierIoError(f"cannot create a tier in {folder}: {error}") from error
    return True


def open_index(folder: Path, index_bytes: int, identity: Identity, io: DiskIo) -> LmdbIndex:
    """Open and check the index of a folder together with its payload file; create both if nothing
    was stored yet. Raises ``IndexUnusableError`` and ``OSError``."""
    path = folder / PAYLOAD_NAME
    file_id = secrets.token_hex(_ID_BYTES)
    if is_new(folder):
        with contextlib.closing(PayloadFile(path, io)) as file:
            write_id(file, file_id)
        sync_folder(folder)
    index = LmdbIndex(folder, index_bytes, Manifest(identity, file_id))
    try:
        check_partner(folder, index.manifest)
    except BaseException:  # close LMDB after any failure
        index.close()
        raise
    return index


def is_lmdb_folder(folder: Path) -> bool:
    """Return True if an LMDB tier has ever stored something in this folder, even if little is left
    of it."""
    try:
        return index_exists(folder) or not is_new(folder)
    except IndexUnusableError:
        return True


def is_new(folder: Path) -> bool:
    """Return True if nothing was stored in a folder yet. Raises ``IndexUnusableError`` if something
    was stored and the index is missing: a payload file is longer than one page only after an index
    was created, and has no id once its index was moved aside on purpose."""
    path = folder / PAYLOAD_NAME
    if index_exists(folder):
        return False
    if is_not_ours(path):
        raise IndexUnusableError(f"{path.name} was not written by kvtiers")
    if path.exists() and path.stat().st_size > ALIGNMENT and read_id(path) != _NO_ID:
        word = "is empty" if os.path.lexists(folder / lmdb_index.DATA_NAME) else "is missing"
        raise IndexUnusableError(
            f"its index {lmdb_index.DATA_NAME} {word}, beside {path.stat().st_size} bytes of "
            f"{path.name}"
        )
    return True


def check_partner(folder: Path, manifest: Manifest) -> None:
    """Raise ``IndexUnusableError`` unless the payload file is the one that the index names."""
    path = folder / PAYLOAD_NAME
    if not os.path.lexists(path):
        raise IndexUnusableError(f"its {path.name} is missing")
    if is_not_ours(path):
        raise IndexUnusableError(f"{path.name} was not written by kvtiers")
    if read_id(path) != manifest.file_id:
        raise IndexUnusableError(f"{path.name} is not the one that its index names")


def keep_good(index: LmdbIndex, expected: Expected, *, strict: bool) -> Recovered:
    """Recover the content of the index, without records that are damaged or belong to another
    server. Those are deleted, or with ``strict`` they raise ``IndexUnusableError``."""
    found = recover(index.tables(), expected)
    why = "are incomplete or belong to another server"
    if found.without_key:
        key = "were stored without this encryption key" if expected.key_ids else "are encrypted"
        why = f"are incomplete, belong to another server, or {key}"
    if found.bad and strict:
        raise IndexUnusableError(f"{len(found.bad)} records {why}")
    if found.bad:
        logger.warning("kvtiers: dropped %d records in %s that %s", len(found.bad), index.path, why)
        index.apply_in_parts(Changes(edits=dict.fromkeys(found.bad)))
    return found


# -- the capacity --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a capacity: bytes of the index, pages of the payload file, and the maximum
    number of records."""

    index_bytes: int
    pages_max: int
    records_max: int


def index_bytes(limits: Limits, bytes_per_record: int) -> int:
    """Return the part of a capacity that a new index takes (its file is preallocated)."""
    records = -(-limits.capacity_bytes // limits.record_bytes)
    pages = max(INDEX_BYTES_MIN, records * bytes_per_record) // ALIGNMENT
    return pages * ALIGNMENT


def divide(folder: Path, limits: Limits, bytes_per_record: int, small_bytes: int) -> Division:
    """Divide a capacity among index, payloads and ``small_bytes`` for other files. An index made
    for a larger capacity keeps its size. Raises ``IndexUnusableError`` if nothing is left for
    records."""
    taken = index_bytes(limits, bytes_per_record)
    path = folder / lmdb_index.DATA_NAME
    if os.path.lexists(path):
        taken = max(taken, path.lstat().st_size // ALIGNMENT * ALIGNMENT)
    pages = (limits.capacity_bytes - taken - small_bytes) // ALIGNMENT
    if pages < 2:
        raise IndexUnusableError(
            f"an index of {taken:,} bytes leaves no space for records in a capacity of "
            f"{limits.capacity_bytes:,}"
        )
    return Division(taken, pages, taken // bytes_per_record)


def check_capacity(limits: Limits, bytes_per_record: int, small_bytes: int) -> int:
    """Return the bytes for records beside a new index, page 0 and ``small_bytes``. Raises
    ``ValueError`` if there are none."""
    taken = index_bytes(limits, bytes_per_record)
    left = limits.capacity_bytes - taken - small_bytes - ALIGNMENT
    if left < ALIGNMENT:
        raise ValueError(
            f"a capacity of {limits.capacity_bytes:,} bytes leaves no space for records: the index "
            f"takes {taken:,}. Give more"
        )
    return left // ALIGNMENT * ALIGNMENT


def smallest_capacity(
    payload_bytes: int, record_bytes: int, bytes_per_record: int, small_bytes: int
) -> int:
    """Return the smallest capacity that has space for one record of ``payload_bytes`` beside the
    index that ``check_capacity`` assumes. Raises ``ValueError`` if records are smaller than their
    entries in the index."""
    if record_bytes <= bytes_per_record:
        raise ValueError(f"records of {record_bytes} bytes are smaller than their index entries")
    fixed = small_bytes + (1 + pages_for(payload_bytes)) * ALIGNMENT
    # The larger of the smallest index and one that grows with the capacity.
    grown = -(-fixed * record_bytes // (record_bytes - bytes_per_record)) + bytes_per_record
    return max(fixed + INDEX_BYTES_MIN, grown)


def free_bytes(file: PayloadFile, configured: int | None) -> int:
    """Return how much the payload file may still grow on its file system. ``configured`` bytes stay
    free; by default 5 %, at least 2 GiB."""
    if configured is None:
        found = os.fstatvfs(file.fd)
        configured = max(2 << 30, found.f_blocks * found.f_frsize // 20)
    return file.free_bytes - configured


# -- the payload file ----------------------------------------------------------------------


def _first_page(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, len(_MAGIC) + _ID_BYTES, 0)
    finally:
        os.close(fd)


def is_not_ours(path: Path) -> bool:
    """Return True if the file exists and this tier did not create it."""
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_file():
        return True
    return path.stat().st_size > 0 and not _first_page(path).startswith(_MAGIC)


def read_id(path: Path) -> str:
    """Return the id of a payload file; empty if it has none."""
    return _first_page(path)[len(_MAGIC) :].hex() if path.exists() else ""


def write_id(file: PayloadFile, file_id: str) -> None:
    """Write page 0, durably. The rest of the file keeps its blocks, whose content no longer has a
    meaning."""
    page: Buffer = Scratch(ALIGNMENT).at_least(ALIGNMENT)
    raw = _MAGIC + bytes.fromhex(file_id)
    page[: len(raw)] = memoryview(raw)
    file.grow(ALIGNMENT)
    file.write([page], 0)
    file.sync()


def _write_first_page(path: Path, content: bytes) -> None:
    """Write these bytes at the beginning of a payload file, durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)

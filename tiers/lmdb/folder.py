"""What a folder of an LMDB tier is made of, whether one process has it or several share it.

    <folder>/data.mdb         the index (see ``lmdb_index``), preallocated
    <folder>/payload.data     page 0: magic, format, file id; then the records' places
    <folder>/quarantine-*     what could not be trusted, renamed

The index names the payload file by its id, so that neither is ever used with another's partner.
A capacity covers both. Everything here blocks and runs in one thread at a time.

``is_new`` and ``check_partner`` judge what lies there, beside ``lmdb_index.check_file``. Whoever
opens a folder, and whoever only looks at it (``lmdb_reader``), calls the same three, so that a
look from outside says what an open would do.
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


def open_or_set_aside(folder: Path, open_files: Callable[[], None], *, strict: bool) -> bool:
    """Call ``open_files``. If it raises ``IndexUnusableError``, move the index aside, and the
    payload file unless it is ours, and call it again: it begins empty then. A payload file of ours
    keeps its blocks, which means that nothing can be had from the index that was moved aside.
    Whether it came to that.

    With ``strict`` nothing is touched, and that is a ``TierIoError``.
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
    if is_foreign(path):
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
    """The index of a folder, checked, whose partner is the payload file there; both are made if
    nothing was stored yet. Raises ``IndexUnusableError`` and ``OSError``."""
    path = folder / PAYLOAD_NAME
    file_id = secrets.token_hex(_ID_BYTES)
    if is_new(folder):
        with contextlib.closing(PayloadFile(path, io)) as file:
            write_id(file, file_id)
        sync_folder(folder)
    index = LmdbIndex(folder, index_bytes, Manifest(identity, file_id))
    try:
        check_partner(folder, index.manifest)
    except BaseException:
        index.close()
        raise
    return index


def is_lmdb_folder(folder: Path) -> bool:
    """Whether an LMDB tier has stored something in this folder, whatever is left of it."""
    try:
        return index_exists(folder) or not is_new(folder)
    except IndexUnusableError:
        return True


def is_new(folder: Path) -> bool:
    """Whether nothing was stored in a folder yet. Raises ``IndexUnusableError`` if something was,
    and its index is gone: a payload file is longer than one page only after an index was made, and
    has no id once an index was moved aside on purpose."""
    path = folder / PAYLOAD_NAME
    if index_exists(folder):
        return False
    if is_foreign(path):
        raise IndexUnusableError(f"{path.name} is no file of ours")
    if path.exists() and path.stat().st_size > ALIGNMENT and read_id(path) != _NO_ID:
        word = "is empty" if os.path.lexists(folder / lmdb_index.DATA_NAME) else "is missing"
        raise IndexUnusableError(
            f"its index {lmdb_index.DATA_NAME} {word}, beside {path.stat().st_size} bytes of "
            f"{path.name}"
        )
    return True


def check_partner(folder: Path, manifest: Manifest) -> None:
    """Raise ``IndexUnusableError`` unless the payload file is the one that the index means."""
    path = folder / PAYLOAD_NAME
    if not os.path.lexists(path):
        raise IndexUnusableError(f"its {path.name} is missing")
    if is_foreign(path):
        raise IndexUnusableError(f"{path.name} is no file of ours")
    if read_id(path) != manifest.file_id:
        raise IndexUnusableError(f"{path.name} is not the one that its index means")


def keep_good(index: LmdbIndex, expected: Expected, *, strict: bool) -> Recovered:
    """What the index holds, without records that are not whole or not ours: they are forgotten,
    or with ``strict`` an ``IndexUnusableError``."""
    found = recover(index.tables(), expected)
    if found.bad and strict:
        raise IndexUnusableError(f"{len(found.bad)} records are not whole or not ours")
    if found.bad:
        text = "kvtiers: %d records in %s are not whole or not of this server: dropped"
        logger.warning(text, len(found.bad), index.path)
        index.apply_in_parts(Changes(edits=dict.fromkeys(found.bad)))
    return found


# -- the capacity --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Division:
    """How a capacity is divided: bytes of the index, pages of the payload file, and how many
    records there may be."""

    index_bytes: int
    pages_max: int
    records_max: int


def index_bytes(limits: Limits, bytes_per_record: int) -> int:
    """The part of a capacity that a new index takes (its file is preallocated)."""
    records = -(-limits.capacity_bytes // limits.record_bytes)
    pages = max(INDEX_BYTES_MIN, records * bytes_per_record) // ALIGNMENT
    return pages * ALIGNMENT


def divide(folder: Path, limits: Limits, bytes_per_record: int, small_bytes: int) -> Division:
    """Among index, payloads and ``small_bytes`` for other files. An index made for a larger
    capacity keeps its size. Raises ``IndexUnusableError`` if nothing is left for records."""
    taken = index_bytes(limits, bytes_per_record)
    path = folder / lmdb_index.DATA_NAME
    if os.path.lexists(path):
        taken = max(taken, path.lstat().st_size // ALIGNMENT * ALIGNMENT)
    pages = (limits.capacity_bytes - taken - small_bytes) // ALIGNMENT
    if pages < 2:
        raise IndexUnusableError(
            f"an index of {taken} bytes leaves no room for records in a capacity of "
            f"{limits.capacity_bytes}"
        )
    return Division(taken, pages, taken // bytes_per_record)


def check_capacity(limits: Limits, bytes_per_record: int, small_bytes: int) -> int:
    """Bytes for records below a new index: all but page 0 and ``small_bytes``. Raises
    ``ValueError`` if there are none."""
    taken = index_bytes(limits, bytes_per_record)
    left = limits.capacity_bytes - taken - small_bytes - ALIGNMENT
    if left < ALIGNMENT:
        raise ValueError(
            f"a capacity of {limits.capacity_bytes} bytes leaves no room for records: the index "
            f"takes {taken}. Give more"
        )
    return left // ALIGNMENT * ALIGNMENT


def least_capacity(
    payload_bytes: int, record_bytes: int, bytes_per_record: int, small_bytes: int
) -> int:
    """The smallest capacity with room for one record of ``payload_bytes`` beside the index that
    ``check_capacity`` takes for it. Raises ``ValueError`` if records are smaller than their entries
    in the index."""
    if record_bytes <= bytes_per_record:
        raise ValueError(f"records of {record_bytes} bytes are smaller than their index entries")
    fixed = small_bytes + (1 + pages_for(payload_bytes)) * ALIGNMENT
    # The larger of an index of the least size and one that grows with the capacity.
    grown = -(-fixed * record_bytes // (record_bytes - bytes_per_record)) + bytes_per_record
    return max(fixed + INDEX_BYTES_MIN, grown)


def free_bytes(file: PayloadFile, configured: int | None) -> int:
    """What the payload file may still take of its file system. So many ``configured`` bytes stay
    free of that; unless configured 5 %, at least 2 GiB."""
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


def _write_first_page(path: Path, content: bytes) -> None:
    """Put this at the beginning of a payload file, durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(fd, content, 0)
        os.fsync(fd)
    finally:
        os.close(fd)

"""The open files of an LMDB tier that has its folder alone, and how such a tier is set up.

Beside what is in every folder of an LMDB tier (``lmdb_folder``) there is ``owner.lock``: the live
owner's pid. Everything here blocks and runs in one thread at a time, before the tier's threads
exist or after they ended.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import lmdb

from tiers.base import ALIGNMENT, TierIoError
from tiers.folders.folder import OwnerLock, prepare
from tiers.io.codec import Codec, KeyRing
from tiers.io.direct_io import DiskIo, PayloadFile
from tiers.lmdb.folder import (
    PAYLOAD_NAME,
    check_capacity,
    divide,
    free_bytes,
    keep_good,
    open_index,
    open_or_set_aside,
)
from tiers.lmdb.index import RECORD_INDEX_BYTES, Changes, Limits
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.recovery.recover import Expected
from tiers.record import Identity

SMALL_FILES_BYTES = 4 * ALIGNMENT
"""What the owner's lock and LMDB's table of readers take on the disk, with something to spare."""


def payload_capacity_bytes(capacity_bytes: int, record_bytes: int = 64 << 10) -> int:
    """What is left of a capacity for records: all but the index, page 0 and small files.

    Raises ``ValueError`` if that is nothing.
    """
    limits = Limits(capacity_bytes, record_bytes)
    return check_capacity(limits, RECORD_INDEX_BYTES, SMALL_FILES_BYTES)


class LmdbFiles:
    """The open files of one tier. ``recovered`` is what the index held, ``found_epoch`` the epoch
    that it was of; ``was_set_aside`` says that it began empty because it could not be used."""

    def __init__(self, folder: Path, capacity_bytes: int, options: LmdbOptions, io: DiskIo) -> None:
        """Open or create. Raises ``TierIoError``, and ``ValueError`` for too small a capacity."""
        self._folder = folder
        self._options = options
        self._io = io
        self._identity = Identity(options.namespace, options.rank)
        self._limits = Limits(capacity_bytes, options.record_bytes)
        check_capacity(self._limits, RECORD_INDEX_BYTES, SMALL_FILES_BYTES)
        self.codec = make_codec(self._identity, options)
        prepare(folder, allow_network=options.allow_network)
        self._lock = OwnerLock(folder)
        is_strict = options.recovery is Recovery.STRICT
        try:
            self.was_set_aside = open_or_set_aside(folder, self._open_files, strict=is_strict)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError | lmdb.Error):
                raise TierIoError(f"cannot open the tier in {folder}: {error}") from error
            raise

    def _open_files(self) -> None:
        division = divide(self._folder, self._limits, RECORD_INDEX_BYTES, SMALL_FILES_BYTES)
        self.pages_max, self.records_max = division.pages_max, division.records_max
        options, path = self._options, self._folder / PAYLOAD_NAME
        with contextlib.ExitStack() as undo:
            index = open_index(self._folder, division.index_bytes, self._identity, self._io)
            self.index = index
            undo.callback(index.close)
            depth = options.io_threads
            self.file = PayloadFile(path, self._io, direct=options.direct_io, depth=depth)
            undo.callback(self.file.close)
            self._recover()
            index.note_limits(self._limits)
            undo.pop_all()

    def _recover(self) -> None:
        limit = min(self.file.size_bytes // ALIGNMENT, self.pages_max)
        options, epoch = self._options, self.index.epoch
        self.found_epoch = epoch
        if options.recovery is Recovery.OFF or options.epoch > epoch:
            # Never beyond the caller's epoch: whoever keeps the epoch would bump it in vain later.
            self.index.apply(Changes(clear_to_epoch=max(options.epoch, epoch)))
        expected = Expected(self._identity, self.index.epoch, limit, self.codec.key_ids)
        is_strict = options.recovery is Recovery.STRICT
        self.recovered = keep_good(self.index, expected, strict=is_strict)
        if self.file.size_bytes > self.pages_max * ALIGNMENT:
            self.file.truncate(self.pages_max * ALIGNMENT)
        self.file_pages = max(limit, 1)

    def grow(self, pages: int) -> int:
        """Lengthen the payload file by at least ``pages`` if the reserve allows; the pages
        gained (0: none). Blocks. Raises ``OSError``."""
        free = free_bytes(self.file, self._options.reserve_bytes) // ALIGNMENT
        wanted = max(pages, self._options.grow_bytes // ALIGNMENT)
        gain = min(wanted, self.pages_max - self.file_pages, free)
        if gain < pages:
            return 0
        self.file.grow((self.file_pages + gain) * ALIGNMENT)
        self.file_pages += gain
        return gain

    def close(self) -> None:
        """Release everything, once no thread uses it. Blocks."""
        try:
            self.index.close()
            self.file.close()
        finally:
            self._lock.release()


def make_codec(identity: Identity, options: LmdbOptions) -> Codec:
    """Raises ``TierIoError`` for a key file or a package that is not there."""
    keys = KeyRing.load(Path(options.key_file), identity.namespace) if options.key_file else None
    try:
        return Codec(identity, keys=keys, compress=options.compress)
    except ImportError as error:
        raise TierIoError(
            "compression needs the package zstandard. Run: pip install kvtiers[compress]"
        ) from error

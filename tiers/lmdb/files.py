"""The open files of an exclusive LMDB tier.

Its folder holds ``owner.lock``, with the pid of the live owner, beside the files of every LMDB tier
(``lmdb.folder``). Every function here blocks. They run in one thread at a time, before the tier's
threads start or after they have ended.
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
    open_or_quarantine,
)
from tiers.lmdb.index import RECORD_INDEX_BYTES, Changes, Limits
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.recovery.recover import Expected
from tiers.record import Identity

SMALL_FILES_BYTES = 4 * ALIGNMENT
"""Disk space of the owner's lock and LMDB's reader table, with a margin."""


def payload_capacity_bytes(capacity_bytes: int, record_bytes: int = 64 << 10) -> int:
    """Return the part of a capacity that is left for records, without index, page 0 and small
    files.

    Raises ``ValueError`` if nothing is left.
    """
    limits = Limits(capacity_bytes, record_bytes)
    return check_capacity(limits, RECORD_INDEX_BYTES, SMALL_FILES_BYTES)


class LmdbFilesBase:
    """The common part of the open files of an exclusive and of a shared tier.

    ``pages_max`` and ``records_max`` limit all processes together. ``was_quarantined`` is True if
    the index could not be used, so that the tier began empty.
    """

    record_index_bytes = RECORD_INDEX_BYTES
    small_files_bytes = SMALL_FILES_BYTES

    def __init__(self, folder: Path, capacity_bytes: int, options: LmdbOptions, io: DiskIo) -> None:
        """Check the options and prepare the folder. Raises ``TierIoError``, and ``ValueError`` if
        the capacity is too small."""
        self.folder = folder
        self.was_quarantined = False
        self._options = options
        self._io = io
        self._identity = Identity(options.namespace, options.rank)
        self._limits = Limits(capacity_bytes, options.record_bytes)
        check_capacity(self._limits, self.record_index_bytes, self.small_files_bytes)
        self.codec = make_codec(self._identity, options)
        prepare(folder, allow_network=options.allow_network)

    def _divide(self) -> int:
        """Apply the limits to the files in the folder. Returns the size of the index."""
        sizes = (self.record_index_bytes, self.small_files_bytes)
        division = divide(self.folder, self._limits, *sizes)
        self.pages_max, self.records_max = division.pages_max, division.records_max
        return division.index_bytes

    def _gain(self, file: PayloadFile, file_pages: int, pages: int, step_bytes: int) -> int:
        """The number of pages by which the file may grow: at least ``pages``, or 0 if there is no
        space."""
        free = free_bytes(file, self._options.reserve_bytes) // ALIGNMENT
        gain = min(max(pages, step_bytes // ALIGNMENT), self.pages_max - file_pages, free)
        return gain if gain >= pages else 0


class LmdbFiles(LmdbFilesBase):
    """The open files of one tier. ``recovered`` is the content of the index and ``found_epoch`` its
    epoch."""

    def __init__(self, folder: Path, capacity_bytes: int, options: LmdbOptions, io: DiskIo) -> None:
        """Open or create the files. Raises ``TierIoError``, and ``ValueError`` if the capacity is
        too small."""
        super().__init__(folder, capacity_bytes, options, io)
        self._lock = OwnerLock(folder)
        is_strict = options.recovery is Recovery.STRICT
        try:
            self.was_quarantined = open_or_quarantine(folder, self._open_files, strict=is_strict)
        except BaseException as error:  # unlock the folder after any failure
            self._lock.release()
            if isinstance(error, OSError | lmdb.Error):
                raise TierIoError(f"cannot open the tier in {folder}: {error}") from error
            raise

    def _open_files(self) -> None:
        index_bytes = self._divide()
        options, path = self._options, self.folder / PAYLOAD_NAME
        with contextlib.ExitStack() as undo:
            index = open_index(self.folder, index_bytes, self._identity, self._io)
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
            # Clear to the caller's epoch, not past it. If the index were ahead, the caller's next
            # epoch would clear nothing.
            self.index.apply(Changes(clear_to_epoch=max(options.epoch, epoch)))
        expected = Expected(self._identity, self.index.epoch, limit, self.codec.key_ids)
        is_strict = options.recovery is Recovery.STRICT
        self.recovered = keep_good(self.index, expected, strict=is_strict)
        if self.file.size_bytes > self.pages_max * ALIGNMENT:
            self.file.truncate(self.pages_max * ALIGNMENT)
        self.file_pages = max(limit, 1)

    def grow(self, pages: int) -> int:
        """Extend the payload file by at least ``pages`` if the reserve allows. Returns the pages
        gained (0: none). Blocks. Raises ``OSError``."""
        gain = self._gain(self.file, self.file_pages, pages, self._options.grow_bytes)
        if gain:
            self.file.grow((self.file_pages + gain) * ALIGNMENT)
            self.file_pages += gain
        return gain

    def close(self) -> None:
        """Release everything once no thread uses the files any more. Blocks."""
        try:
            self.index.close()
            self.file.close()
        finally:
            self._lock.release()


def make_codec(identity: Identity, options: LmdbOptions) -> Codec:
    """Create the codec of a tier. Raises ``TierIoError`` if a key file or a package is missing."""
    keys = KeyRing.load(Path(options.key_file), identity.namespace) if options.key_file else None
    try:
        return Codec(identity, keys=keys, compress=options.compress)
    except ImportError as error:
        raise TierIoError(
            "compression needs the package zstandard. Run: pip install zstandard"
        ) from error

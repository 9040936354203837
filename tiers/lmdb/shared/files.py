"""The open files of an LMDB tier that several processes of one machine share.

The files are those of an exclusive tier (``lmdb.folder``), with more tables in the index. A process
that opens the folder while no other process uses it checks everything as an exclusive tier does,
and rebuilds the tables of free extents and of the order of use from the records. This also frees
the extents that killed processes had reserved. Processes that join later trust these tables.

Every function here blocks. Except for ``grow``, they run in one thread at a time, before the tier's
threads start or after they have ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

import lmdb

from tiers.base import ALIGNMENT, TierIoError
from tiers.folders.folder import MEMBERS_MAX
from tiers.io.direct_io import DiskIo, PayloadFile
from tiers.lmdb.files import LmdbFilesBase
from tiers.lmdb.folder import (
    PAYLOAD_NAME,
    keep_good,
    open_index,
    open_or_quarantine,
    read_id,
)
from tiers.lmdb.index import (
    DATA_NAME,
    Changes,
    IndexUnusableError,
    LmdbIndex,
    index_exists,
)
from tiers.lmdb.options import LmdbOptions, Recovery
from tiers.lmdb.records.record_table import USE_BYTES, with_use
from tiers.lmdb.recovery.recover import Expected, Recovered
from tiers.lmdb.shared.free_extents import put_free_extents
from tiers.lmdb.shared.index import SHARED_RECORD_INDEX_BYTES, SharedIndex, State, is_common
from tiers.lmdb.shared.members import Member, opening_lock
from tiers.lmdb.shared.transaction import changing

logger = logging.getLogger(__name__)

SHARED_SMALL_FILES_BYTES = (MEMBERS_MAX + 8) * ALIGNMENT
"""Disk space of the locks of the maximum number of processes, and of LMDB's reader table."""
GROW_BYTES_MAX = 64 << 20
"""A small step, because the file grows inside a transaction for which other processes wait."""


def _twin_hint() -> str:
    """Explains a lock conflict: LMDB locks the byte of its reader table at the offset of the
    pid."""
    return (
        f". A process in another container has the same pid as this one ({os.getpid()}), and LMDB "
        f"identifies processes by their pids: let the containers share one pid namespace "
        "(docker: --pid=host, Kubernetes: hostPID)"
    )


class SharedLmdbFiles(LmdbFilesBase):
    """The open files of one process. ``own_epoch`` is ``None`` while the process works under the
    common epoch. ``dropped`` counts damaged records that were dropped."""

    record_index_bytes = SHARED_RECORD_INDEX_BYTES
    small_files_bytes = SHARED_SMALL_FILES_BYTES

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        options: LmdbOptions,
        io: DiskIo,
        noted_epoch: int = 0,
    ) -> None:
        """Open or create the files. An odd ``options.epoch`` means that the weights are not those
        of the model's files. Raises ``TierIoError``, and ``ValueError`` if the capacity is too
        small."""
        super().__init__(folder, capacity_bytes, options, io)
        self._noted_epoch = noted_epoch
        self.dropped = 0
        with contextlib.ExitStack() as undo, opening_lock(folder):
            self.member = Member(folder)
            undo.callback(self.member.release)
            try:
                if self.member.is_alone:
                    self._open_alone(undo)
                    self.member.join()
                    self.own_epoch = self._begin(noted_epoch=0)  # the check has compared it
                else:
                    self._open_beside(undo)
                    self.own_epoch = self._begin(noted_epoch)
            except (OSError, lmdb.Error, IndexUnusableError) as error:
                hint = _twin_hint() if os.strerror(errno.EAGAIN) in str(error) else ""
                raise TierIoError(f"cannot open the tier in {folder}: {error}{hint}") from error
            undo.pop_all()

    def _begin(self, noted_epoch: int) -> int | None:
        """Clean up after ended processes, and drop what those of an earlier version may have
        adopted from before an unfinished reset. Returns this process's epoch if it is not the
        common one."""
        is_own = self._options.epoch % 2 == 1
        with changing(self.index, self.member.number) as changes:
            changes.roll_back_one(self.member.number)
            changes.roll_back(self.member.is_alive)
            was_stale = changes.pass_epoch(noted_epoch)
            own_epoch = changes.begin_epoch(own_epoch=0) if is_own else None
        if was_stale:
            self._warn_of_reset(noted_epoch)
        return own_epoch

    def _warn_of_reset(self, epoch: int) -> None:
        logger.warning(
            "kvtiers: the shared tier in %s begins empty: a server that did not share the "
            "folder was reset (epoch %d), so its records may be of other weights",
            *(self.folder, epoch),
        )

    # -- the first process ----------------------------------------------------------------------

    def _open_alone(self, undo: contextlib.ExitStack) -> None:
        is_strict = self._options.recovery is Recovery.STRICT
        self.was_quarantined = open_or_quarantine(self.folder, self._check, strict=is_strict)
        self._open_files(self._divide(), undo)
        if self.file.size_bytes > self.pages_max * ALIGNMENT:
            self.file.truncate(self.pages_max * ALIGNMENT)
        self.index.reserve_file()
        self._rebuild(*self._checked)

    def _check(self) -> None:
        """Create an index, or check the existing one and drop damaged records."""
        index = open_index(self.folder, self._divide(), self._identity, self._io)
        with contextlib.closing(index):
            old = self._old_state(index)
            path = self.folder / PAYLOAD_NAME
            pages = min(path.stat().st_size // ALIGNMENT, self.pages_max)
            expected = Expected(self._identity, index.epoch, pages, self.codec.key_ids)
            is_strict = self._options.recovery is Recovery.STRICT
            found = keep_good(index, expected, strict=is_strict)
            self.dropped = len(found.bad)
            index.note_limits(self._limits)
            old.open(pages, index.epoch)
            self._checked: tuple[Recovered, State] = found, old

    def _old_state(self, index: LmdbIndex) -> State:
        """Return the state that the last sharers left. Drops all records if an exclusive tier has
        used the folder since and was reset, perhaps not to the end, or if ``Recovery.OFF`` is
        configured."""
        state = State()
        raw = index.state()
        if raw is not None:
            with contextlib.suppress(IndexUnusableError):
                state = State.load(raw)
        was_shared = is_common(raw, index.epoch)
        is_stale = not was_shared and (index.epoch != self._options.epoch or index.epoch % 2 == 1)
        is_stale = is_stale or index.epoch < self._noted_epoch
        highest = max(index.epoch, self._noted_epoch)
        state.see_epoch(highest)
        if is_stale and any(table.count for table in index.tables()):
            self._warn_of_reset(highest)
        if self._options.recovery is Recovery.OFF or is_stale:
            index.apply(Changes(clear_to_epoch=state.begin_epoch()))
        return state

    def _rebuild(self, found: Recovered, state: State) -> None:
        """Rebuild the other tables from the recovered records."""
        tables = self.index.tables
        with self.index.env.begin(write=True) as txn:
            txn.drop(tables.intents, delete=False)
            txn.drop(tables.order, delete=False)
            last = 0
            by_use = (key for batch in found.records.by_use() for key in batch.keys)
            for key in by_use:
                value = found.records.get(key) or b""
                noted = int.from_bytes(value[:USE_BYTES], "big")
                use = max(noted, last + 1)
                packed = use.to_bytes(USE_BYTES, "big")
                if use != noted:  # times of use must be distinct
                    txn.put(key, with_use(value, use), db=tables.records)
                txn.put(packed, key, db=tables.order, append=True)
                last = use
            free_pages = put_free_extents(txn, tables.free, found.free)
            state.rebuild(len(found.records), free_pages, max(found.next_use, last + 1))
            txn.put(b"state", state.dump(), db=tables.meta)

    # -- processes that join --------------------------------------------------------------------

    def _open_beside(self, undo: contextlib.ExitStack) -> None:
        if not index_exists(self.folder):
            raise IndexUnusableError("its index was removed while other processes used it")
        # with its present size: an index of this process's capacity can be larger or smaller
        self._open_files((self.folder / DATA_NAME).stat().st_size, undo)
        with self.index.reading() as txn:
            manifest, limits = self.index.manifest_in(txn), self.index.limits_in(txn)
            self.index.state_in(txn)
        if manifest is None or limits is None:
            raise IndexUnusableError("it has no manifest")
        if manifest.identity != self._identity:
            raise IndexUnusableError("it belongs to another namespace or rank")
        if read_id(self.folder / PAYLOAD_NAME) != manifest.file_id:
            raise IndexUnusableError("its payload file belongs to another index")
        if limits != self._limits:
            logger.warning(
                "kvtiers: %s is shared; its capacity is %d bytes, its record_bytes %d. The "
                "values configured here, %d and %d, have no effect while other processes use it",
                *(self.folder, limits.capacity_bytes, limits.record_bytes),
                *(self._limits.capacity_bytes, self._limits.record_bytes),
            )
            self._limits = limits
        self.index.env.set_mapsize(self._divide())
        self.index.reserve_file()

    def _open_files(self, index_bytes: int, undo: contextlib.ExitStack) -> None:
        self.index = SharedIndex(self.folder, index_bytes)
        undo.callback(self.index.close)
        path = self.folder / PAYLOAD_NAME
        self.file = PayloadFile(path, self._io, direct=self._options.direct_io)
        undo.callback(self.file.close)

    # -- while the files are open ---------------------------------------------------------------

    @property
    def medium(self) -> str:
        """The id of the payload file."""
        with self.index.reading() as txn:
            manifest = self.index.manifest_in(txn)
        return manifest.file_id if manifest else ""

    def grow(self, file_pages: int, pages: int) -> int:
        """Extend the payload file, as ``transaction.Grow`` requires."""
        step_bytes = min(self._options.grow_bytes, GROW_BYTES_MAX)
        gain = self._gain(self.file, file_pages, pages, step_bytes)
        if not gain:
            return 0
        try:
            self.file.grow((file_pages + gain) * ALIGNMENT)
        except OSError:
            return 0
        return gain

    def close(self) -> None:
        """Release everything once no thread uses the files any more. Blocks."""
        try:
            self.index.close()
            self.file.close()
        finally:
            self.member.release()

"""Opening the folder of an LMDB tier that several processes of one machine share.

The files are those of an exclusive tier (``lmdb_store``), with more tables in the index. Whoever
comes first, and is alone, checks everything as an exclusive tier does, and makes the tables of
free runs and of the order of use from the records; what a process that was killed had reserved is
free then. Whoever comes later trusts what the living work on.

Everything here blocks and runs in one thread at a time, before the tier's threads exist or after
they ended, except ``grow``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from pathlib import Path

import lmdb

from tiers import lmdb_index
from tiers.base import ALIGNMENT, TierIoError
from tiers.direct_io import DiskIo, PayloadFile
from tiers.folder import prepare, quarantine, sync_folder
from tiers.lmdb_index import (
    INDEX_BYTES_MIN,
    Changes,
    IndexUnusableError,
    Limits,
    LmdbIndex,
    Manifest,
    index_exists,
)
from tiers.lmdb_store import (
    PAYLOAD_NAME,
    Ending,
    LmdbOptions,
    Recovery,
    is_foreign,
    make_codec,
    read_id,
    reserve_bytes,
    write_id,
)
from tiers.record import Identity
from tiers.record_table import USE_BYTES, with_use
from tiers.recover import Expected, Recovered, recover
from tiers.shared_changes import changing
from tiers.shared_index import SHARED_RECORD_INDEX_BYTES, SharedIndex, State
from tiers.shared_space import store_free_runs
from tiers.sharers import Sharer, opening

logger = logging.getLogger(__name__)

GROW_BYTES_MAX = 64 << 20
"""The file grows inside a transaction, for which the others wait."""


def index_bytes(limits: Limits) -> int:
    """The part of a capacity that the index takes (its file is preallocated)."""
    records = -(-limits.capacity_bytes // limits.record_bytes)
    pages = max(INDEX_BYTES_MIN, records * SHARED_RECORD_INDEX_BYTES) // ALIGNMENT
    return pages * ALIGNMENT


class SharedStore:
    """The open files of one process. ``own_epoch`` is ``None`` while it works under the common
    epoch. ``pages_max`` and ``records_max`` are limits of all processes together."""

    def __init__(self, folder: Path, capacity_bytes: int, options: LmdbOptions, io: DiskIo) -> None:
        """Open or create. An odd ``options.epoch`` says that the weights are not those of the
        model's files. Raises ``TierIoError``, and ``ValueError`` for too small a capacity."""
        self.folder = folder
        self._options = options
        self._io = io
        self._identity = Identity(options.namespace, options.rank)
        self._limit(Limits(capacity_bytes, options.record_bytes))
        self.quarantined: Path | None = None
        self.dropped = 0
        self.codec = make_codec(self._identity, options)
        prepare(folder, allow_network=options.allow_network)
        with contextlib.ExitStack() as undo, opening(folder):
            self.sharer = Sharer(folder)
            undo.callback(self.sharer.release)
            try:
                if self.sharer.is_alone:
                    self._open_alone(undo)
                    self.sharer.join()
                else:
                    self._open_beside(undo)
                self.own_epoch = self._begin()
            except (OSError, lmdb.Error, IndexUnusableError) as error:
                raise TierIoError(f"cannot open the tier in {folder}: {error}") from error
            undo.pop_all()

    def _limit(self, limits: Limits) -> None:
        self._limits = limits
        left = (limits.capacity_bytes - index_bytes(limits)) // ALIGNMENT
        if left < 2:
            raise ValueError(
                f"a capacity of {limits.capacity_bytes} bytes leaves no room for records: the "
                f"index takes {index_bytes(limits)}. Give more"
            )
        self.pages_max = left
        self.records_max = index_bytes(limits) // SHARED_RECORD_INDEX_BYTES

    def _begin(self) -> int | None:
        """Clean up after those who ended; the epoch of this process, if not the common one."""
        is_own = self._options.epoch % 2 == 1
        with changing(self.index, self.sharer.number) as changes:
            changes.roll_back_one(self.sharer.number)
            changes.roll_back(self.sharer.is_alive)
            return changes.begin_epoch(own_epoch=0) if is_own else None

    # -- the first -------------------------------------------------------------------------

    def _open_alone(self, undo: contextlib.ExitStack) -> None:
        try:
            found, old = self._check()
        except IndexUnusableError as error:
            if self._options.recovery is Recovery.STRICT:
                raise TierIoError(
                    f"the tier in {self.folder} is damaged: {error}. Use recovery "
                    '"quiet" to move the files aside and start empty'
                ) from error
            logger.warning("kvtiers: the tier in %s begins empty: %s", self.folder, error)
            names = list(lmdb_index.FILES)
            if is_foreign(self.folder / PAYLOAD_NAME):
                names.append(PAYLOAD_NAME)
            self.quarantined = quarantine(self.folder, names)
            found, old = self._check()
        self._open_files(undo)
        if self.file.size_bytes > self.pages_max * ALIGNMENT:
            self.file.truncate(self.pages_max * ALIGNMENT)
        self.index.reserve_file()
        self._rebuild(found, old)

    def _check(self) -> tuple[Recovered, State]:
        """Make an index or check the one that is there, and drop what is no good record."""
        path = self.folder / PAYLOAD_NAME
        is_new = not index_exists(self.folder)
        file_id = secrets.token_hex(16)
        if is_new:
            if is_foreign(path):
                raise IndexUnusableError(f"{path} is not ours")
            with contextlib.closing(PayloadFile(path, self._io)) as file:
                write_id(file, file_id)
            sync_folder(self.folder)
        index = LmdbIndex(self.folder, index_bytes(self._limits), Manifest(self._identity, file_id))
        try:
            if is_foreign(path) or read_id(path) != index.manifest.file_id:
                raise IndexUnusableError(f"{path} is not the payload file of this index")
            old = self._old_state(index)
            pages = min(path.stat().st_size // ALIGNMENT, self.pages_max)
            expected = Expected(self._identity, index.epoch, pages, self.codec.key_ids)
            found = recover(index.tables(), expected)
            if found.bad:
                index.apply(Changes(edits=dict.fromkeys(found.bad)))
            self.dropped = len(found.bad)
            index.note_limits(self._limits)
            old.file_pages, old.common = max(pages, 1), index.epoch
            return found, old
        finally:
            index.close()

    def _old_state(self, index: LmdbIndex) -> State:
        """What the last sharers left. Where a tier that does not share was here since and reset
        it, or the caller wants it so, everything is forgotten."""
        state = State()
        raw = index.state()
        if raw is not None:
            with contextlib.suppress(IndexUnusableError):
                state = State.load(raw)
        was_shared = raw is not None and state.common == index.epoch
        is_stale = not was_shared and (index.epoch != self._options.epoch or index.epoch % 2 == 1)
        state.highest = max(state.highest, index.epoch)
        if self._options.recovery is Recovery.OFF or is_stale:
            state.highest += 1
            index.apply(Changes(clear_to_epoch=state.highest))
        return state

    def _rebuild(self, found: Recovered, state: State) -> None:
        """Make the tables beside the records from what was found."""
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
                if use != noted:  # times of use must differ
                    txn.put(key, with_use(value, use), db=tables.records)
                txn.put(packed, key, db=tables.order, append=True)
                last = use
            state.rolled_back += state.reserved
            state.free_pages = store_free_runs(txn, tables.free, found.free)
            state.records, state.reserved = len(found.records), 0
            state.next_use = max(found.next_use, last + 1)
            txn.put(b"state", state.dump(), db=tables.meta)

    # -- all others ------------------------------------------------------------------------

    def _open_beside(self, undo: contextlib.ExitStack) -> None:
        if not index_exists(self.folder):
            raise IndexUnusableError("its index was removed under those who share it")
        self._open_files(undo)
        with self.index.reading() as txn:
            manifest, limits = self.index.manifest_in(txn), self.index.limits_in(txn)
            self.index.state_in(txn)
        if manifest is None or limits is None:
            raise IndexUnusableError("it has no manifest")
        if manifest.identity != self._identity:
            raise IndexUnusableError("it belongs to another namespace or rank")
        if read_id(self.folder / PAYLOAD_NAME) != manifest.file_id:
            raise IndexUnusableError("its payload file is that of another index")
        if limits != self._limits:
            logger.warning(
                "kvtiers: %s is shared with a capacity of %d bytes for records of %d and more; "
                "%d and %d were configured here and do not count while others use it",
                *(self.folder, limits.capacity_bytes, limits.record_bytes),
                *(self._limits.capacity_bytes, self._limits.record_bytes),
            )
            self._limit(limits)
            self.index.env.set_mapsize(index_bytes(limits))
        self.index.reserve_file()

    def _open_files(self, undo: contextlib.ExitStack) -> None:
        self.index = SharedIndex(self.folder, index_bytes(self._limits))
        undo.callback(self.index.close)
        path = self.folder / PAYLOAD_NAME
        self.file = PayloadFile(path, self._io, direct=self._options.direct_io)
        undo.callback(self.file.close)

    # -- while it is open ------------------------------------------------------------------

    @property
    def medium(self) -> str:
        """The id of the payload file."""
        with self.index.reading() as txn:
            manifest = self.index.manifest_in(txn)
        return manifest.file_id if manifest else ""

    def grow(self, file_pages: int, pages: int) -> int:
        """Lengthen the payload file as ``shared_changes`` asks for."""
        room = self.file.free_bytes - reserve_bytes(self.file, self._options.reserve_bytes)
        wanted = max(pages, min(self._options.grow_bytes, GROW_BYTES_MAX) // ALIGNMENT)
        gain = min(wanted, self.pages_max - file_pages, room // ALIGNMENT)
        if gain < pages:
            return 0
        try:
            self.file.grow((file_pages + gain) * ALIGNMENT)
        except OSError:
            return 0
        return gain

    def close(self, *threads: Ending) -> None:
        """Release everything once these threads have ended, however long they hang. Blocks."""
        for each in threads:
            each.stop()
        try:
            self.index.close()
            self.file.close()
        finally:
            self.sharer.release()

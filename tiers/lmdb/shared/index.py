"""The index of an LMDB tier that several processes share. It contains everything that the processes
must know about each other, and none of them caches it between transactions.

    meta      b"manifest", b"limits" as in ``lmdb.index``; b"epoch" -> the common epoch;
              b"state" -> ``State``
    records   key -> value, as in ``lmdb.index``
    order     time of last use (8 bytes, big-endian), different for each record -> key
    free      free extents, see ``shared.free_extents``
    intents   sharer (2 bytes) and first page (8 bytes), big-endian -> an allocation it is filling

In every committed transaction, every page of the payload file except the first belongs to exactly
one record, intent or free extent; ``check`` verifies that. ``shared.transaction`` makes the
changes.

A record is visible only to processes that work under its epoch. All sharers whose weights are those
of the model's files work under the common epoch. A process whose weights were changed works under
an epoch that no other process uses.

Ownership: any thread may begin transactions; one process at a time writes (``writing``).
"""

from __future__ import annotations

import fcntl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import lmdb

from tiers.base import Key, StoredKeys
from tiers.folders.lock_file import LockFile
from tiers.io.extents import Extent, gaps
from tiers.lmdb.index import (
    DATA_NAME,
    RECORDS_NAME,
    IndexFile,
    IndexUnusableError,
    Limits,
    Manifest,
    extents_of,
)
from tiers.lmdb.records.key_order import Part, keys_by_use
from tiers.lmdb.records.record_table import EXTENTS_AT, USE_BYTES, tables_of
from tiers.lmdb.shared.free_extents import free_extents

WRITING_NAME = "writing.lock"
"""The process whose write transaction is open holds this lock (flock)."""
READERS_MAX = 256
"""Number of slots in LMDB's reader table, for all processes together."""
SHARED_RECORD_INDEX_BYTES = 768
"""Index space reserved per record: ``lmdb.index`` takes 512, and a record is also in ``order``."""
_EPOCH_AT = USE_BYTES + 16


@dataclass(slots=True)
class State:
    """Sums over the other tables, and monotonic counters.

    ``file_pages`` is the length of the payload file. ``free_pages``, ``records`` and ``reserved``
    count the contents of ``free``, ``records`` and ``intents``. ``cursor`` is where the last
    allocation ended. ``next_use`` is greater than every time of use. ``highest`` is the highest
    epoch ever begun, ``common`` the common epoch as the last sharer left it. ``evicted`` and
    ``rolled_back`` count records and allocations since the index was created.
    """

    file_pages: int = 1
    free_pages: int = 0
    records: int = 0
    reserved: int = 0
    cursor: int = 0
    next_use: int = 0
    highest: int = 0
    common: int = 0
    evicted: int = 0
    rolled_back: int = 0

    # -- when the first sharer opens the folder --

    def open(self, file_pages: int, epoch: int) -> None:
        """Set the length of the payload file and the common epoch."""
        self.file_pages = max(file_pages, 1)
        self.common = epoch

    def rebuild(self, records: int, free_pages: int, next_use: int) -> None:
        """Set the totals after the tables were rebuilt. No reservation is left."""
        self.rolled_back += self.reserved
        self.records, self.reserved = records, 0
        self.free_pages, self.next_use = free_pages, next_use

    # -- in a transaction --

    def store_free(self, cursor: int, free_pages: int) -> None:
        """Set where the last allocation ended, and the number of free pages."""
        self.cursor, self.free_pages = cursor, free_pages

    def grow(self, pages: int) -> None:
        """Record that the payload file has grown."""
        self.file_pages += pages

    def reserve(self) -> None:
        """Count a new intent."""
        self.reserved += 1

    def end_intent(self) -> None:
        """Count an intent that has ended."""
        self.reserved -= 1

    def roll_back(self, count: int) -> None:
        """Count intents of ended processes that were rolled back."""
        self.reserved -= count
        self.rolled_back += count

    def add_record(self) -> None:
        """Count a new record."""
        self.records += 1

    def remove_record(self) -> None:
        """Count a record that was removed."""
        self.records -= 1

    def evict(self, count: int) -> None:
        """Count evicted records, which were also removed."""
        self.evicted += count

    def take_use(self, time_ns: int) -> int:
        """Return a unique time of use: ``time_ns``, or ``next_use`` if that is later."""
        use = max(self.next_use, time_ns)
        self.next_use = use + 1
        return use

    def see_epoch(self, epoch: int) -> None:
        """Record an epoch that an exclusive tier or another process has begun."""
        self.highest = max(self.highest, epoch)

    def begin_epoch(self, *, is_common: bool = False) -> int:
        """Begin an epoch that no process has ever used. With ``is_common`` it becomes the common
        one."""
        self.highest += 1
        if is_common:
            self.common = self.highest
        return self.highest

    def dump(self) -> bytes:
        return _STATE.pack(*astuple(self))

    @classmethod
    def load(cls, raw: bytes | None) -> State:
        """Decode a state. Raises ``IndexUnusableError``."""
        if raw is None or len(raw) != _STATE.size:
            raise IndexUnusableError("the processes that made it did not share it")
        return cls(*_STATE.unpack(raw))


_STATE = struct.Struct(f"<{len(fields(State))}Q")


def is_common(raw: bytes | None, epoch: int) -> bool:
    """Return True if ``epoch``, the epoch of an index, is the common epoch of engines that shared
    the index last. ``raw`` is their state. It stays in the index if a tier that does not share uses
    the folder later, but a reset of that tier changes the epoch."""
    if raw is None:
        return False
    try:
        return State.load(raw).common == epoch
    except IndexUnusableError:
        return False


def epoch_of(value: bytes) -> int:
    """Return the epoch of a record."""
    return int.from_bytes(value[_EPOCH_AT : _EPOCH_AT + 8], "little")


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of the named databases."""

    meta: Any
    records: Any
    order: Any
    free: Any
    intents: Any


class SharedIndex:
    """The open LMDB environment."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        """Open or create. Raises ``lmdb.Error`` and ``OSError``."""
        self._file = IndexFile(folder / DATA_NAME)
        self.env = lmdb.open(
            str(folder),
            map_size=map_bytes,
            mode=0o600,
            max_dbs=5,
            max_readers=READERS_MAX,
            readahead=False,
            writemap=False,
        )
        self._turn = threading.Lock()
        self._turns: LockFile | None = None
        try:
            self._turns = LockFile(folder / WRITING_NAME)
            self.env.reader_check()
            names = (b"meta", RECORDS_NAME, b"order", b"free", b"intents")
            self.tables = Databases(*(self.env.open_db(name) for name in names))
        except BaseException:  # close LMDB after any failure
            self.close()
            raise

    def reserve_file(self) -> None:
        """Allocate the file's blocks. Raises ``OSError``."""
        self._file.reserve(self.env.info()["map_size"])

    def see_file(self) -> None:
        """Raise ``OSError`` if the file is shorter than its map."""
        self._file.check()

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Begin a short read transaction."""
        self.see_file()
        with self.env.begin() as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Begin a write transaction, durable at the end. Processes take turns through a ``flock``,
        so that no two of them wait for LMDB's own lock. That lock is a robust futex: if a waiter is
        killed just as it is woken, the others can sleep forever although the lock is free. A
        ``flock`` has no such gap."""
        self.see_file()
        turns = self._turns
        assert turns is not None
        with self._turn:
            fcntl.flock(turns.fd, fcntl.LOCK_EX)
            try:
                with self.env.begin(write=True) as txn:
                    yield txn
            finally:
                fcntl.flock(turns.fd, fcntl.LOCK_UN)

    def manifest_in(self, txn: Any) -> Manifest | None:
        raw = txn.get(b"manifest", db=self.tables.meta)
        return None if raw is None else Manifest.load(bytes(raw))

    def limits_in(self, txn: Any) -> Limits | None:
        return Limits.load(txn.get(b"limits", db=self.tables.meta))

    def state_in(self, txn: Any) -> State:
        """Return the state within a transaction. Raises ``IndexUnusableError``."""
        return State.load(txn.get(b"state", db=self.tables.meta))

    def common_epoch_in(self, txn: Any) -> int:
        return int.from_bytes(txn.get(b"epoch", db=self.tables.meta) or b"", "little")

    def state(self) -> State:
        with self.reading() as txn:
            return self.state_in(txn)

    def find(self, keys: Sequence[Key], own_epoch: int | None) -> tuple[int, list[bytes | None]]:
        """Return the epoch that the caller works under, and the values of those keys whose records
        are of this epoch."""
        with self.reading() as txn:
            epoch = self.common_epoch_in(txn) if own_epoch is None else own_epoch
            values = [txn.get(key, db=self.tables.records) for key in keys]
        mark = epoch.to_bytes(8, "little")
        at = slice(_EPOCH_AT, _EPOCH_AT + 8)
        return epoch, [v if v is not None and v[at] == mark else None for v in values]

    def by_use(self, own_epoch: int | None) -> list[StoredKeys]:
        """List the caller's records, least recently used first."""
        with self.reading() as txn:
            epoch = self.common_epoch_in(txn) if own_epoch is None else own_epoch
            with txn.cursor(db=self.tables.records) as cursor:
                mine = tables_of((k, v) for k, v in cursor.iternext() if epoch_of(v) == epoch)
        return keys_by_use([Part(table) for table in mine])

    def check(self) -> None:
        """Raise ``AssertionError`` unless the tables agree with each other. For tests."""
        tables = self.tables
        with self.reading() as txn:
            state = self.state_in(txn)
            records = dict(txn.cursor(db=tables.records).iternext())
            intents = list(txn.cursor(db=tables.intents).iternext())
            order = dict(txn.cursor(db=tables.order).iternext())
            free = free_extents(txn, tables.free)
        held = [extents_of(value) for value in records.values()]
        held += [extents_of(bytes(EXTENTS_AT) + extents) for _key, extents in intents]
        taken = [Extent(0, 1), *(extent for extents in held for extent in extents)]
        expected = gaps(state.file_pages, taken)
        assert free == expected, f"free {free}, but {expected} have no owner"
        assert order == {v[:USE_BYTES]: k for k, v in records.items()}, "order and records differ"
        counted = (len(records), len(intents), sum(extent.pages for extent in free))
        assert (state.records, state.reserved, state.free_pages) == counted

    def close(self) -> None:
        """Release the files."""
        self.env.close()
        if self._turns is not None:
            self._turns.close()

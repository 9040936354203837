"""Changes that the command line makes below a tier's path, in folders that no server uses.

The owner of a rank's folder keeps its index in memory, so no other process may write to the folder.
Short changes hold the lock of the path; a server that starts at that moment waits for it. Long ones
are divided into batches, between which such a server gets the lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from offload.namespaces.claims import Owner, locked
from offload.namespaces.inventory import RankFolder
from tiers.base import Key
from tiers.folders.folder import FolderUnusableError, OwnerLock, prepare
from tiers.lmdb.index import check_file
from tiers.offline.file_reader import FileReader
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import (
    Checker,
    FolderChangedError,
    ListedRecord,
    OfflineFolder,
    RecordHealth,
)
from tiers.offline.remove import index_mark, remove_files, remove_from_lmdb

KEYS_PER_LOCK = 10_000
"""Maximum number of records that are checked and removed under one lock."""
HOLD_S = 0.5
"""Time after which a batch ends even if it has checked fewer records, because a starting server
waits for it. Half of this time is for the checks, half for the removals. A single record or
transaction can take longer, and the time to open the folder does not count."""
GAP_S = 0.1
"""Time between two batches. A server that waits for the lock tries to take it several times in this
time."""

T = TypeVar("T")
Choose = Callable[[OfflineFolder], Callable[[T], Key | None]]
"""Makes a function for an open folder. The function returns a record's key if the record must be
removed."""
Note = Callable[[int], object]
"""Called after each batch with the number of records that it has removed: an error can end the work
between two batches."""


class RankFolderInUseError(Exception):
    """A live process uses the rank folder."""

    def __init__(self, rank_folder: RankFolder, owner: Owner) -> None:
        self.owner = owner
        super().__init__(
            f"{rank_folder.folder} is in use by pid {owner.pid} {owner.engine}".rstrip()
        )


@contextlib.contextmanager
def exclusive_access(rank_folder: RankFolder) -> Iterator[None]:
    """Inside the context, keep others from opening a rank folder. Raises ``RankFolderInUseError``,
    ``FolderChangedError`` if the folder is gone, ``TierError``, ``TierUnavailableError`` or
    ``OSError``."""
    with contextlib.ExitStack() as undo:
        if rank_folder.namespace:
            prepare(root_of(rank_folder), allow_network=True)
            undo.enter_context(locked(root_of(rank_folder)))
        if not rank_folder.folder.is_dir():  # another command has removed its namespace
            raise FolderChangedError(f"{rank_folder.folder} was removed")
        prepare(rank_folder.folder, allow_network=True)
        owner = rank_folder.owner()
        if owner is not None:
            raise RankFolderInUseError(rank_folder, owner)
        undo.callback(OwnerLock(rank_folder.folder).release)
        yield


def root_of(rank_folder: RankFolder) -> Path:
    """The path of the tier to which a rank folder with a namespace belongs."""
    return rank_folder.folder.parents[2]


def remove_damaged(
    rank_folder: RankFolder, damaged: Sequence[ListedRecord], key_file: str, note: Note
) -> None:
    """Check these records again while no other process can use the folder, and remove those that
    are still damaged. Raises the errors of ``exclusive_access``."""
    mark = _checked_mark(rank_folder)
    _Removal(rank_folder, _still_damaged, key_file, mark).run(damaged, note)


def _checked_mark(rank_folder: RankFolder) -> bytes:
    """Check an LMDB index, which can take seconds, without the lock; return its ``index_mark``. A
    failure shows again under the lock, unless a server was changing the index."""
    with contextlib.suppress(FolderUnusableError, OSError):
        mark = index_mark(rank_folder.folder)
        if mark:
            rank_folder.open().close()
        return mark
    return b""


def _still_damaged(reader: OfflineFolder) -> Callable[[ListedRecord], Key | None]:
    checker = Checker(reader)
    # a file tier reads many headers for this, which must not count as time of the batch
    _ = reader.owner
    return lambda one: one.key if checker.check(one)[0] is RecordHealth.DAMAGED else None


def remove_unused(rank_folder: RankFolder, before_ns: int, note: Note) -> None:
    """Remove every record whose last use is known to be before that time.

    Listing can take minutes, so it happens without a lock, and a server may use the folder
    meanwhile. Each record is therefore checked again under the lock. Raises the errors of
    ``exclusive_access``.
    """
    mark = index_mark(rank_folder.folder)
    reader = rank_folder.open()
    try:
        old = [r.key for batch in reader.batches() for r in batch if is_older(r, before_ns)]
    finally:
        reader.close()
    _Removal(rank_folder, partial(_still_unused, before_ns), "", mark).run(old, note)


def _still_unused(before_ns: int, reader: OfflineFolder) -> Callable[[Key], Key | None]:
    def chosen(key: Key) -> Key | None:
        one = reader.find(key)
        return key if one is not None and is_older(one, before_ns) else None

    return chosen


def is_older(record: ListedRecord, before_ns: int) -> bool:
    """True if a record's last use is known to be before that time."""
    return 0 < record.use_ns < before_ns


class _Removal(Generic[T]):
    """Removes the records that ``choose`` chooses, in batches. No other process can use the folder
    during a batch.

    ``mark`` is the ``index_mark`` of an LMDB index that was checked: only an index that another
    process has changed since then is checked under the lock.
    """

    def __init__(
        self, rank_folder: RankFolder, choose: Choose[T], key_file: str, mark: bytes
    ) -> None:
        self._rank_folder = rank_folder
        self._choose = choose
        self._key_file = key_file
        self._mark = mark

    def run(self, found: Sequence[T], note: Note) -> None:
        """Check these records and remove the chosen ones."""
        done = 0
        while done < len(found):
            if done:
                time.sleep(GAP_S)
            with exclusive_access(self._rank_folder):
                done += self._batch(found[done : done + KEYS_PER_LOCK], note)

    def _batch(self, found: Sequence[T], note: Note) -> int:
        """Check the first of these records and remove the chosen ones; return how many are done."""
        reader = self._open()
        keys: list[Key] = []
        positions: list[int] = []
        done = 0
        try:
            chosen = self._choose(reader)
            start = time.monotonic()
            while done < len(found) and (done == 0 or time.monotonic() < start + HOLD_S / 2):
                key = chosen(found[done])
                if key is not None:
                    keys.append(key)
                    positions.append(done)
                done += 1
        finally:
            reader.close()
        removed = self._remove(reader, keys, start + HOLD_S)
        note(removed)
        return done if removed == len(keys) else positions[removed]

    def _open(self) -> LmdbReader | FileReader:
        folder = self._rank_folder.folder
        if self._rank_folder.kind == "file":
            return FileReader(folder)
        if index_mark(folder) != self._mark:
            check_file(folder)
        return LmdbReader(folder, is_owned=True, key_file=self._key_file)

    def _remove(self, reader: LmdbReader | FileReader, keys: list[Key], until: float) -> int:
        if isinstance(reader, FileReader):
            return remove_files(reader, keys, until)
        removed = remove_from_lmdb(reader.folder, reader.owner, keys, until)
        self._mark = index_mark(reader.folder)
        return removed

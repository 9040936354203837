"""Changes that the command line makes below a tier's path, in folders that no server uses.

The owner of a rank's folder keeps its index in memory, so no other process may write to the folder.
Short changes hold the lock of the path; a server that starts at that moment waits a few seconds for
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from offload.namespaces.claims import Owner, locked
from offload.namespaces.inventory import RankFolder
from tiers.base import Key
from tiers.folders.folder import OwnerLock, prepare
from tiers.offline.file_reader import FileReader
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import (
    Checker,
    FolderChangedError,
    ListedRecord,
    OfflineFolder,
    RecordHealth,
)
from tiers.offline.remove import remove_files, remove_from_lmdb

KEYS_PER_LOCK = 10_000
"""Number of records that are checked and removed under one lock. In an index of 200,000 records
this takes a fraction of a second."""


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


def remove_damaged(rank_folder: RankFolder, damaged: Sequence[ListedRecord], key_file: str) -> int:
    """Check these records again while no other process can use the folder, and remove those that
    are still damaged.

    Returns their number. Raises the errors of ``exclusive_access``.
    """
    return _remove(rank_folder, partial(_still_damaged, damaged), key_file)


def _still_damaged(records: Sequence[ListedRecord], reader: OfflineFolder) -> list[Key]:
    checker = Checker(reader)
    return [one.key for one in records if checker.check(one)[0] is RecordHealth.DAMAGED]


def remove_unused(rank_folder: RankFolder, before_ns: int) -> int:
    """Remove every record whose last use is known to be before that time; return their number.

    Listing can take minutes, so it happens without a lock, and a server may use the folder
    meanwhile. Each record is therefore checked again under the lock. Raises the errors of
    ``exclusive_access``.
    """
    reader = rank_folder.open()
    try:
        old = [r.key for batch in reader.batches() for r in batch if is_older(r, before_ns)]
    finally:
        reader.close()
    removed = 0
    for start in range(0, len(old), KEYS_PER_LOCK):
        some = old[start : start + KEYS_PER_LOCK]
        removed += _remove(rank_folder, partial(_still_unused, some, before_ns))
    return removed


def _still_unused(keys: Sequence[Key], before_ns: int, reader: OfflineFolder) -> list[Key]:
    found = map(reader.find, keys)
    return [one.key for one in found if one is not None and is_older(one, before_ns)]


def is_older(record: ListedRecord, before_ns: int) -> bool:
    """True if a record's last use is known to be before that time."""
    return 0 < record.use_ns < before_ns


def _remove(
    rank_folder: RankFolder, choose: Callable[[OfflineFolder], list[Key]], key_file: str = ""
) -> int:
    """Remove the records that ``choose`` returns while no other process can use the folder; return
    their number."""
    with exclusive_access(rank_folder):
        reader = _open_owned(rank_folder, key_file)
        try:
            keys = choose(reader)
        finally:
            reader.close()
        if isinstance(reader, FileReader):
            remove_files(reader, keys)
        elif keys:
            remove_from_lmdb(rank_folder.folder, reader.owner, keys)
    return len(keys)


def _open_owned(rank_folder: RankFolder, key_file: str) -> LmdbReader | FileReader:
    """Open a folder to which this process has exclusive access."""
    if rank_folder.kind == "file":
        return FileReader(rank_folder.folder)
    return LmdbReader(rank_folder.folder, is_owned=True, key_file=key_file)

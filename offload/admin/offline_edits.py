"""Changes that the command line makes below a tier's path, in folders that no server uses.

The owner of a rank's folder keeps its index in memory, so no other process may write to the folder.
Short changes hold the lock of the path; a server that starts at that moment waits a few seconds for
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.namespaces.claims import Owner, locked
from offload.namespaces.inventory import RankFolder
from tiers.base import Key
from tiers.folders.folder import OwnerLock, prepare
from tiers.offline.file_reader import FileReader
from tiers.offline.lmdb_reader import LmdbReader
from tiers.offline.offline_folder import Checker, ListedRecord, OfflineFolder, RecordHealth
from tiers.offline.remove import forget_files, forget_in_lmdb

KEYS_PER_LOCK = 20_000
"""Number of records removed under one lock; takes a fraction of a second."""


class RankFolderInUseError(Exception):
    """A live process uses the rank folder."""

    def __init__(self, rank_folder: RankFolder, owner: Owner) -> None:
        self.owner = owner
        super().__init__(
            f"{rank_folder.folder} is in use by pid {owner.pid} {owner.engine}".rstrip()
        )


@contextlib.contextmanager
def alone_with(rank_folder: RankFolder) -> Iterator[None]:
    """Inside the context, keep others from opening a rank folder. Raises ``RankFolderInUseError``,
    ``TierError``, ``TierUnavailableError`` or ``OSError``."""
    prepare(rank_folder.folder, allow_network=True)
    with contextlib.ExitStack() as undo:
        if rank_folder.namespace:
            undo.enter_context(locked(root_of(rank_folder)))
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

    Returns their number. Raises the errors of ``alone_with``.
    """
    with alone_with(rank_folder):
        reader = _open_alone(rank_folder, key_file)
        try:
            checker = Checker(reader)
            bad = [one.key for one in damaged if checker.check(one)[0] is RecordHealth.DAMAGED]
        finally:
            reader.close()
        _forget(rank_folder, reader, bad)
    return len(bad)


def remove_unused(rank_folder: RankFolder, before_ns: int) -> int:
    """Remove every record whose last use is known to be before that time; return their number.

    Raises the errors of ``alone_with``.
    """
    reader = rank_folder.open()
    try:
        old = [r.key for batch in reader.batches() for r in batch if is_older(r, before_ns)]
    finally:
        reader.close()
    for start in range(0, len(old), KEYS_PER_LOCK):
        with alone_with(rank_folder):
            _forget(rank_folder, reader, old[start : start + KEYS_PER_LOCK])
    return len(old)


def is_older(record: ListedRecord, before_ns: int) -> bool:
    """True if a record's last use is known to be before that time."""
    return 0 < record.use_ns < before_ns


def _open_alone(rank_folder: RankFolder, key_file: str) -> LmdbReader | FileReader:
    if rank_folder.kind == "file":
        return FileReader(rank_folder.folder)
    # ``alone_with`` has just checked who owns the folder.
    return LmdbReader(rank_folder.folder, is_owned=True, key_file=key_file)


def _forget(rank_folder: RankFolder, reader: OfflineFolder, keys: Sequence[Key]) -> None:
    if isinstance(reader, FileReader):
        forget_files(reader, keys)
    elif keys:
        assert isinstance(reader, LmdbReader), f"records of {reader} cannot be removed"
        forget_in_lmdb(rank_folder.folder, reader.owner, keys)

"""Removes records from a folder that no tier has open. The caller holds the folder's owner lock.

This module is separate from the readers of such folders, because readers change nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tiers.base import Key
from tiers.lmdb.index import DATA_NAME, Changes, LmdbIndex, Manifest
from tiers.offline.file_reader import FileReader
from tiers.record import Identity

REMOVED_AT_ONCE = 4096
"""Number of keys per transaction."""


def remove_from_lmdb(folder: Path, owner: Identity, keys: Sequence[Key]) -> None:
    """Remove records from an LMDB tier's index, durably. Their extents are free at the next open.

    Raises ``IndexUnusableError`` or ``OSError``. No reader may be open in this process.
    """
    index = LmdbIndex(folder, os.path.getsize(folder / DATA_NAME), Manifest(owner, ""))
    try:
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            index.apply(Changes(edits=dict.fromkeys(keys[start : start + REMOVED_AT_ONCE])))
    finally:
        index.close()


def remove_files(reader: FileReader, keys: Sequence[Key]) -> None:
    """Remove records of a file tier. Raises ``OSError``."""
    for key in keys:
        with contextlib.suppress(FileNotFoundError):
            reader.path_of(key).unlink()

"""Removes records from a folder that no tier has open. The caller holds the folder's owner lock.

This module is separate from the readers of such folders, because readers change nothing.

Others wait for the caller, so every function ends soon after ``until``, a time of
``time.monotonic``. Each removes at least one record, unless there are none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tiers.base import Key
from tiers.lmdb.index import DATA_NAME, Changes, LmdbIndex, Manifest
from tiers.lmdb.recovery.pages import META_PAGES, PAGE_BYTES_MAX
from tiers.offline.file_reader import FileReader
from tiers.record import Identity

REMOVED_AT_ONCE = 512
"""Number of keys per transaction. A slow disk writes a transaction of this size within a fraction
of a second."""


def index_mark(folder: Path) -> bytes:
    """Return bytes that change with every transaction of a folder's LMDB index: those of its first
    two pages, which name the current state, and of more if its pages are small. Empty if there is
    no index. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError), (folder / DATA_NAME).open("rb") as file:
        found = os.fstat(file.fileno())
        pages = file.read(META_PAGES * PAGE_BYTES_MAX)
        return f"{found.st_dev} {found.st_ino} ".encode() + pages
    return b""


def remove_from_lmdb(folder: Path, owner: Identity, keys: Sequence[Key], until: float) -> int:
    """Remove the first records of ``keys`` from an LMDB tier's index, durably; return their number.
    Their extents are free at the next open. The caller has checked the index (``check_file``).

    Raises ``IndexUnusableError`` or ``OSError``. No reader may be open in this process.
    """
    if not keys:
        return 0
    size_bytes = os.path.getsize(folder / DATA_NAME)
    index = LmdbIndex(folder, size_bytes, Manifest(owner, ""), is_checked=True)
    done = 0
    try:
        while done < len(keys) and (done == 0 or time.monotonic() < until):
            some = keys[done : done + REMOVED_AT_ONCE]
            index.apply(Changes(edits=dict.fromkeys(some)))
            done += len(some)
    finally:
        index.close()
    return done


def remove_files(reader: FileReader, keys: Sequence[Key], until: float) -> int:
    """Remove the first records of ``keys`` from a file tier; return their number. Raises
    ``OSError``."""
    for done, key in enumerate(keys):
        if done and time.monotonic() >= until:
            return done
        with contextlib.suppress(FileNotFoundError):
            reader.path_of(key).unlink()
    return len(keys)

"""The file that an export is written to: under another name until it is whole, by one at a time.

The part has a lock of the kernel's, which ends with its process: what a killed export left is
written over by the next. Only whoever holds it writes, removes or renames the part, and it looks
again then whether the part that it has locked is still the one that has the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from offload.errors import OffloadError
from tiers.folder import sync_folder


class ExportFileError(OffloadError):
    """An export cannot be written there now."""


@contextlib.contextmanager
def export_file(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A new file, readable by its owner alone, which gets its name at the end of the block,
    durably; if the block raises nothing of it is left. Raises ``ExportFileError`` and ``OSError``.
    """
    part = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
        _take(file, part)
        try:
            if not overwrite and os.path.lexists(path):  # one that waited no longer would see it
                raise ExportFileError(f"{path} exists by now. Name another file, or --overwrite")
            os.fchmod(file.fileno(), 0o600)
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_folder(path.absolute().parent)


def _take(file: IO[bytes], part: Path) -> None:
    """Lock a part. Raises ``ExportFileError`` if another export has it."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise ExportFileError(f"{part} is no regular file. Remove it, or name another file")
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_named = os.path.samestat(found, os.lstat(part))
    except (BlockingIOError, FileNotFoundError):
        is_named = False
    if not is_named:  # or its export ended between our opening and locking it
        raise ExportFileError(
            f"another export is writing {part}. Wait for its end, or name another file"
        )

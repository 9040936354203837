"""The epoch file of a replica's folder: which weights the records below it belong to.

The file outlives the server, so a server that starts knows whether the weights were changed while
the last one ran. The functions block on the disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from offload.errors import NamespaceError
from offload.namespaces.claims import locked
from offload.namespaces.manifest import read_small_file, write_durably

EPOCH_NAME = "epoch"
_EPOCH = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{16})\n")


def read_epoch(folder: str | Path) -> int:
    """The weights epoch of a replica's folder; 0 before the first ``bump_epoch``.

    Raises ``NamespaceError`` if the file is damaged: then no record below the folder can be
    trusted. Raises ``UnreadableError`` if the file cannot be read.
    """
    return find_epoch(folder) or 0


def find_epoch(folder: str | Path) -> int | None:
    """Like ``read_epoch``, but ``None`` if there is no epoch file."""
    path = Path(folder) / EPOCH_NAME
    text = read_small_file(path, 64)
    if text is None:
        return None
    match = _EPOCH.fullmatch(text)
    if match is None or match[2] != _epoch_check(match[1]):
        raise NamespaceError(f"{path} is damaged")
    return int(match[1])


def bump_epoch(
    folder: str | Path, epoch_min: int = 0, noted: Callable[[], None] = lambda: None
) -> int:
    """Begin a new epoch that is not below ``epoch_min``, and return it.

    The epoch is durable when this returns. ``noted`` is called as soon as other processes can see
    it, before the syncs.

    The new epoch is the next odd number: the weights of a running server have changed, and no file
    has the new ones. A server that starts has the weights of the files, and begins an even epoch if
    it finds an odd one. Records of earlier epochs are invalid from here on. If two processes bump,
    each gets a different epoch. The namespace must have been opened. Raises ``OSError``,
    ``NamespaceError`` (the old epoch is damaged) and ``TierUnavailableError``.
    """
    replica_dir = Path(folder)
    replica_dir.mkdir(mode=0o700, exist_ok=True)
    with locked(replica_dir):
        epoch = max(read_epoch(replica_dir) + 1, epoch_min) | 1
        # A file that a power cut damages here costs nothing: its epoch would be invalid anyway.
        write_epoch(replica_dir, epoch, noted)
        return epoch


def restore_epoch(folder: str | Path, begun: int, before: int) -> None:
    """Durably go back from an epoch of ``bump_epoch`` to the one before it. Only for an epoch under
    which nothing was stored. Does nothing if another epoch has begun since. Raises the errors of
    ``bump_epoch``."""
    replica_dir = Path(folder)
    with locked(replica_dir):
        if read_epoch(replica_dir) == begun:
            write_epoch(replica_dir, before)


def raise_epoch(folder: str | Path, epoch_min: int) -> int:
    """Raise the epoch of a replica's folder to ``epoch_min``; returns its epoch then, durably.

    A tier calls this before it stores anything under that epoch. Otherwise ``bump_epoch`` could
    later use the same epoch for other weights. Raises the errors of ``bump_epoch``, and creates no
    folder.
    """
    replica_dir = Path(folder)
    epoch = read_epoch(replica_dir)
    if epoch < epoch_min:
        with locked(replica_dir):
            epoch = max(read_epoch(replica_dir), epoch_min)
            write_epoch(replica_dir, epoch)
    return epoch


def write_epoch(replica_dir: Path, epoch: int, placed: Callable[[], None] | None = None) -> None:
    """Write the epoch durably; ``placed`` is called as soon as other processes can see it. Raises
    ``OSError``."""
    digits = str(epoch).encode()
    content = digits + b" " + _epoch_check(digits) + b"\n"
    write_durably(replica_dir / EPOCH_NAME, content, placed=placed)


def _epoch_check(digits: bytes) -> bytes:
    return hashlib.sha256(b"kvtiers epoch\n" + digits).hexdigest()[:16].encode()

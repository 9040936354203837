"""The open folder of an exclusive file tier. Every function here blocks.

    <folder>/owner.lock
    <folder>/medium                      32 hex digits, drawn when the folder was made
    <folder>/epoch                       the present epoch, decimal
    <folder>/epoch-<n>/                  its records, see ``record_files``

``TierIoError`` means that another disk is mounted at the path, or that the folder is gone; the tier
must then be opened again.

Ownership: any thread may call; only one at a time may call ``begin``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from tiers.base import Key, TierIoError
from tiers.files.record_files import PREFIX, READ, Entry, RecordFiles, by_use
from tiers.folders.folder import OwnerLock, prepare
from tiers.record import Identity

logger = logging.getLogger(__name__)

EPOCH_NAME = "epoch"
EPOCH_DIGITS_MAX = 18
MEDIUM_NAME = "medium"
SHARED_NAME = "shared"
"""Marks a folder that engines share (``shared_folder``)."""


class ExclusiveFolder(RecordFiles):
    """See the module's docstring. ``medium`` changes when the records are lost. ``found_epoch`` is
    the epoch that was on disk, ``epoch`` the present one. ``dropped`` counts files that were not
    complete records. ``was_quarantined`` is True if the folder began empty because the epoch of its
    records is unknown."""

    def __init__(self, path: Path, identity: Identity, epoch: int, capacity_bytes: int) -> None:
        """Check and lock the folder, begin ``epoch`` if that is a later one, and read every header.

        Raises ``TierIoError`` and ``OSError``.
        """
        with contextlib.ExitStack() as undo:
            prepare(path, allow_network=True)
            self._lock = OwnerLock(path)
            undo.callback(self._lock.release)
            super().__init__(path, identity)
            undo.callback(super().close)
            if self._exists(SHARED_NAME):
                raise TierIoError(
                    f"{path} is shared by other engines, perhaps on other machines. Set "
                    f'"shared": true here, too, or use another path; if no engine uses it, remove '
                    f"{SHARED_NAME}"
                )
            self.found_epoch, trouble = self._judge_epoch()
            self.epoch, self.was_quarantined = self.found_epoch, bool(trouble)
            self.medium = self._stored_medium()
            if trouble:
                logger.warning("kvtiers: the tier in %s begins empty: %s", path, trouble)
                # A server that starts with an even epoch keeps an even one: odd epochs mean other
                # weights.
                self.begin(max(epoch, self.epoch + 1 + (self.epoch + 1 - epoch) % 2))
            else:
                self.begin(max(self.found_epoch, epoch))
            self._found, self.dropped = self._scan()
            if self.dropped:
                text = "kvtiers: removed %d files of the tier in %s that are not complete records"
                logger.warning(text, self.dropped, path)
            self.note_capacity(capacity_bytes)
            undo.pop_all()

    def close(self) -> None:
        """Release the folder. Call it only when no thread uses it any more."""
        super().close()
        self._lock.release()

    def take_entries(self) -> dict[Key, Entry]:
        """Hand over the records that were found at open. The caller owns them from then on."""
        found, self._found = self._found, {}
        return found

    def _is_here(self) -> bool:
        is_here = super()._is_here()
        while is_here:
            epoch = self.epoch
            try:
                is_here = self._exists(f"{PREFIX}{epoch}")
            except OSError as error:
                raise TierIoError(f"the folder {self._path} cannot be read: {error}") from error
            if is_here or epoch == self.epoch:
                break
            is_here = True  # another epoch may have begun meanwhile, so check again
        return is_here

    # -- epochs ------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Begin this epoch, durably. If it is later than the present one, its folder begins empty.
        Raises ``OSError``."""
        name = f"{PREFIX}{epoch}"
        if epoch != self.epoch and self._exists(name):
            self._remove_folder(name)
        if not self._exists(name):
            os.mkdir(name, 0o700, dir_fd=self._fd)
        if epoch != self.epoch or not self._exists(EPOCH_NAME):
            self._store(EPOCH_NAME, str(epoch))
        self.epoch = epoch

    def _judge_epoch(self) -> tuple[int, str]:
        text = self._load(EPOCH_NAME) if self._exists(EPOCH_NAME) else None
        return judge_epoch(text, self._epochs(), self._holds_files)

    def _holds_files(self, epoch: int) -> bool:
        fd = os.open(f"{PREFIX}{epoch}", READ | os.O_DIRECTORY, dir_fd=self._fd)
        try:
            return bool(os.listdir(fd))
        finally:
            os.close(fd)

    def _stored_medium(self) -> str:
        """Return the id on disk, or a new one if there is none or its records are gone."""
        found = ""
        with contextlib.suppress(FileNotFoundError):
            found = self._load(MEDIUM_NAME)
        if not found or not self._exists(f"{PREFIX}{self.epoch}"):
            found = secrets.token_hex(16)
            self._store(MEDIUM_NAME, found)
        return found

    def _epochs(self) -> list[int]:
        names = [n for n in os.listdir(self._fd) if n.startswith(PREFIX)]
        numbers = [name.removeprefix(PREFIX) for name in names]
        return [int(number) for number in numbers if number.isdecimal()]

    def remove_old(self) -> None:
        """Remove the records of earlier epochs, as far as possible."""
        with contextlib.suppress(OSError):
            for epoch in self._epochs():
                if epoch < self.epoch:
                    with contextlib.suppress(OSError):
                        self._remove_folder(f"{PREFIX}{epoch}")

    def _scan(self) -> tuple[dict[Key, Entry], int]:
        found: list[tuple[Key, Entry]] = []
        dropped = 0
        for name, entry in self._entries_of(self.epoch):
            if entry is not None:
                found.append(entry)
            else:
                dropped += 1
                os.unlink(f"{PREFIX}{self.epoch}/{name}", dir_fd=self._fd)
        return by_use(found), dropped


def judge_epoch(
    text: str | None, folders: Sequence[int], holds_files: Callable[[int], bool]
) -> tuple[int, str]:
    """Return the epoch of the records in a folder, and why it cannot be known (empty if it can).

    ``text`` is the content of the epoch file (``None``: there is none), ``folders`` are the epochs
    that have a folder there. A tier that opens the folder and a command that inspects it both call
    this.
    """
    latest = max(folders, default=0)
    if text is None:
        is_lost = any(map(holds_files, folders))  # otherwise the folder was just being created
        return latest, "its epoch file is missing" if is_lost else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= EPOCH_DIGITS_MAX):
        return latest, "its epoch file is not readable"
    epoch = int(text)
    if epoch not in folders:
        return max(epoch, latest), f"its epoch file says {epoch}, and {PREFIX}{epoch} is missing"
    return epoch, ""

"""Reads the folder of a file tier from another process. See ``offline_folder`` for the guarantees.

Every record is a file that is renamed to its final name once complete. So a file found by listing
the folder is never half-written: it is intact, or damaged, or removed before it is read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tiers.base import ALIGNMENT, Buffer, Key
from tiers.files.exclusive_folder import EPOCH_NAME, SHARED_NAME, judge_epoch
from tiers.files.record_files import CAPACITY_NAME, PREFIX, READ, record_name
from tiers.folders.folder import FolderUnusableError
from tiers.offline.offline_folder import FolderChangedError, ListedRecord
from tiers.record import HEADER_BYTES, Identity, RecordError, parse, verify

LISTED_AT_ONCE = 256
_RECORD = re.compile(r"[0-9a-f]{64}", re.ASCII)
_EPOCH = re.compile(rf"{PREFIX}[0-9]+", re.ASCII)


def is_file_folder(folder: Path) -> bool:
    """Return True if a file tier has used this folder."""
    names = [path.name for path in folder.glob("epoch*")]
    return EPOCH_NAME in names or any(map(_EPOCH.fullmatch, names))


class FileReader:
    """An ``OfflineFolder`` over a file tier. If the header of a record is damaged, its key is
    unknown; the name of its file is used instead."""

    kind = "file"

    def __init__(self, folder: Path) -> None:
        """Raises ``FolderUnusableError`` and ``OSError``."""
        self.folder = folder
        self.is_shared = (folder / SHARED_NAME).exists()
        self.epoch = self._judged_epoch()
        # 0 for tiers of versions that did not store it
        self.capacity_bytes = self._number(CAPACITY_NAME)
        self._owner: Identity | None = None
        self._records_fd = -1  # of a shared folder: the folder of the records, as last seen

    def can_decrypt(self, found: ListedRecord) -> bool:
        return True  # no record of a file tier is encrypted

    @property
    def owner(self) -> Identity | None:
        """The identity in the records, or ``None`` if there are none. The first use reads a batch
        of headers, and so do later ones until there are records. Raises ``FolderChangedError``."""
        if self._owner is None:
            batch = next(self.batches(), [])
            found = (_identity(one.mark[:HEADER_BYTES]) for one in batch)
            identities = Counter(identity for identity in found if identity is not None)
            # the most frequent one, because some headers may be damaged
            self._owner = identities.most_common(1)[0][0] if identities else None
        return self._owner

    @property
    def file_bytes(self) -> int:
        """Disk space of the records' files. Looks at each of them."""
        total = 0
        for path in self._files():
            with contextlib.suppress(OSError):  # removed meanwhile
                total += path.lstat().st_blocks * 512
        return total

    def _judged_epoch(self) -> int:
        """Return the epoch that the tier itself would use. Raises ``FolderUnusableError``."""
        if self.is_shared:
            return self._stored_epoch()  # 0, the common epoch: a shared folder stores no other one
        while True:
            text = self._text(EPOCH_NAME)
            numbers = [path.name.removeprefix(PREFIX) for path in self.folder.glob(f"{PREFIX}*")]
            folders = [int(number) for number in numbers if number.isdecimal()]
            epoch, trouble = judge_epoch(text, folders, self._holds_files)
            if not trouble:
                return epoch
            if self._text(EPOCH_NAME) == text:
                # otherwise the owner has begun another epoch meanwhile
                raise FolderUnusableError(trouble)

    def _holds_files(self, epoch: int) -> bool:
        return any(self._epoch_folder(epoch).iterdir())

    def _epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"{PREFIX}{epoch}"

    def _stored_epoch(self) -> int:
        return self._number(EPOCH_NAME)

    def _text(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return None

    def _number(self, name: str) -> int:
        """Return the number in a file, or 0 if there is no such file."""
        try:
            return max(0, int((self.folder / name).read_text(encoding="ascii")))
        except (FileNotFoundError, ValueError):
            return 0

    def _files(self) -> Iterator[Path]:
        try:
            with os.scandir(self._epoch_folder(self.epoch)) as files:
                yield from (Path(f.path) for f in files if _RECORD.fullmatch(f.name))
        except FileNotFoundError:
            return

    def count(self) -> int:
        return sum(1 for _path in self._files())

    def batches(self) -> Iterator[list[ListedRecord]]:
        self._see_epoch()
        batch: list[ListedRecord] = []
        for path in self._files():
            found = _read_head(path)
            if found is not None:
                batch.append(found)
            if len(batch) == LISTED_AT_ONCE:
                yield batch
                batch = []
        if batch:
            yield batch
        self._see_epoch()

    def find(self, key: Key) -> ListedRecord | None:
        self._see_epoch()
        return _read_head(self.path_of(key))

    def _see_epoch(self) -> None:
        """Raise ``FolderChangedError`` if the epoch has ended since this was last called. A reset
        of a shared folder renames the folder of its records, and a new one takes its place under
        the same number. So each reset of a shared folder raises only once."""
        if self._stored_epoch() != self.epoch or (self.is_shared and self._is_other_folder()):
            raise FolderChangedError(f"{self.folder} began a new epoch")

    def _is_other_folder(self) -> bool:
        """Look up the folder of the records, and return True if it is not the one seen before."""
        before, self._records_fd = self._records_fd, -1
        try:
            with contextlib.suppress(FileNotFoundError):
                folder = self._epoch_folder(self.epoch)
                self._records_fd = os.open(folder, READ | os.O_DIRECTORY)
            if before < 0:
                return False
            # the old folder stays open until here, so that the new one cannot have its number
            return self._records_fd < 0 or not os.path.sameopenfile(before, self._records_fd)
        finally:
            if before >= 0:
                os.close(before)

    def path_of(self, key: Key) -> Path:
        """Return the path of a record's file. ``key`` is the record's key, or the file name if the
        key is unknown."""
        name = key.decode("ascii") if _is_name(key) else record_name(key)
        return self._epoch_folder(self.epoch) / name

    def load(self, found: Sequence[ListedRecord], into: Sequence[Buffer]) -> list[bool]:
        return [self._load(one, data) for one, data in zip(found, into, strict=True)]

    def _load(self, found: ListedRecord, into: Buffer) -> bool:
        if _is_name(found.key):
            return False
        owner = self.owner
        if owner is None:
            return False
        try:
            with self.path_of(found.key).open("rb", buffering=0) as file:
                header = file.read(ALIGNMENT)[:HEADER_BYTES]
                done = 0
                while done < into.nbytes:
                    count = file.readinto(into[done:].data)
                    if not count:
                        return False
                    done += count
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                is_longer = bool(file.read(1))
        except OSError:
            return False
        return not is_longer and verify(header, owner, found.key, self.epoch, into)

    def close(self) -> None:
        """Idempotent."""
        if self._records_fd >= 0:
            os.close(self._records_fd)
            self._records_fd = -1


def _is_name(key: Key) -> bool:
    return len(key) == 64 and bool(_RECORD.fullmatch(key.decode("latin-1")))


def _identity(header: bytes) -> Identity | None:
    try:
        found = parse(header)
    except RecordError:
        return None
    return Identity(found.namespace, found.rank)


def _read_head(path: Path) -> ListedRecord | None:
    """Read the header of a file; ``None`` if the file is gone."""
    try:
        fd = os.open(path, READ | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        page, stat = os.read(fd, ALIGNMENT), os.fstat(fd)
    except OSError:
        page, stat = b"", os.fstat(fd)
    finally:
        os.close(fd)
    identity = stat.st_ino.to_bytes(8, "little") + stat.st_size.to_bytes(8, "little")
    header: Any = None
    with contextlib.suppress(RecordError):
        header = parse(page[:HEADER_BYTES])
    key = page[HEADER_BYTES : HEADER_BYTES + header.key_bytes] if header else b""
    mark = page[:HEADER_BYTES] + identity
    if header is None or record_name(key) != path.name:
        return ListedRecord(path.name.encode(), stat.st_mtime_ns, 0, stat.st_size, False, mark)
    size = header.payload_bytes
    return ListedRecord(key, stat.st_mtime_ns, size, header.stored_bytes, False, mark)

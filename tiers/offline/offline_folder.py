"""Reads a tier's records from another process, even while their owner reads and writes them.

Everything may change at any moment: between finding and reading a record, it may be removed and its
space overwritten. So a payload that does not match its record is not necessarily damaged. ``check``
looks up the key again: a record is damaged only if its entry is unchanged after the payload was
read, and a second read fails as well. This is sound because owners free space only after the
transaction that deletes its record.

Nothing in this module writes, claims or locks anything.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tiers.base import Buffer, Key
from tiers.io.direct_io import Scratch
from tiers.record import Identity

PAYLOAD_BYTES_MAX = 1 << 30
"""Larger than any chunk. A record with a greater length is damaged, and no memory is allocated for
it."""
LOOKUP_ATTEMPTS = 4
"""Maximum number of lookups of a record that changes while it is read."""


class FolderChangedError(Exception):
    """Raised if the folder was replaced or began another epoch, so earlier results are no longer
    valid."""


class ListedRecord(NamedTuple):
    """A record as its tier lists it. ``use_ns`` is the time of its last use in ns since 1970, 0 if
    unknown. ``mark`` is equal as long as the same record is at the same location."""

    key: Key
    use_ns: int
    payload_bytes: int
    stored_bytes: int
    is_sealed: bool
    mark: bytes


class RecordHealth(enum.Enum):
    """The state of one record. ``GONE``: removed since it was found. ``SEALED``: encrypted, and
    its key is not available."""

    GOOD = "good"
    DAMAGED = "damaged"
    GONE = "gone"
    SEALED = "sealed"


class OfflineFolder(Protocol):
    """A tier's folder, read by another process. Belongs to one thread. Its methods block."""

    kind: str
    folder: Path
    epoch: int
    is_shared: bool
    """True if several engines share the tier and may use separate epochs."""
    capacity_bytes: int
    """The capacity that the tier was last opened with; 0 if unknown."""

    @property
    def owner(self) -> Identity | None:
        """The owner of the records, or ``None`` if the folder does not contain it."""
        ...

    @property
    def file_bytes(self) -> int:
        """Disk space used by the files."""
        ...

    def count(self) -> int:
        """The approximate number of records."""
        ...

    def batches(self) -> Iterator[list[ListedRecord]]:
        """Iterate over all records in batches of some thousand. Raises ``FolderChangedError``."""
        ...

    def find(self, key: Key) -> ListedRecord | None:
        """Return one record as it is now. Raises ``FolderChangedError``."""
        ...

    def can_decrypt(self, found: ListedRecord) -> bool:
        """False if the record is encrypted with a key that is not available."""
        ...

    def load(self, found: Sequence[ListedRecord], into: Sequence[Buffer]) -> list[bool]:
        """Fill ``into[i]`` with the payload of ``found[i]``. Returns True for each payload that is
        intact and belongs to its record."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Checker:
    """Reads and verifies records of one folder, in a buffer that it reuses."""

    def __init__(self, folder: OfflineFolder) -> None:
        self._folder = folder
        self._scratch = Scratch()

    def check(self, found: ListedRecord) -> tuple[RecordHealth, Buffer]:
        """Return the health of a record, and its payload if the record is intact. The payload is
        valid until the next call.

        Raises ``FolderChangedError``.
        """
        nothing = self._scratch.data[:0]
        failed: bytes | None = None
        for _attempt in range(LOOKUP_ATTEMPTS):
            if not self._folder.can_decrypt(found):
                return RecordHealth.SEALED, nothing
            if 0 < found.payload_bytes <= PAYLOAD_BYTES_MAX:
                payload = self._scratch.at_least(found.payload_bytes)
                if self._folder.load([found], [payload])[0]:
                    return RecordHealth.GOOD, payload
            now = self._folder.find(found.key)
            if now is None:
                return RecordHealth.GONE, nothing
            if now.mark == found.mark == failed:
                return RecordHealth.DAMAGED, nothing
            found, failed = now, found.mark
        return (
            RecordHealth.GONE,
            nothing,
        )  # the record changes each time, because its owner keeps rewriting it

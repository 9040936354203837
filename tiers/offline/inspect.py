"""A look at a tier's records from outside, while its owner reads and writes them or not.

What is looked at may change at any moment: a record may be removed and its place be written anew
between finding and reading it. So a payload that does not fit its record means nothing by itself.
``check`` looks the key up again: only a record that the tier names in the same words after its
payload was read, and that fails again then, is damaged. The owners make that sound: they free a
place only after the transaction that forgot its record.

Nothing here writes, claims or locks anything.
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
"""More than any chunk has; a record that claims more is damaged, and no memory is taken for it."""
ATTEMPTS = 4
"""How often a record that changes under the eyes is looked up again."""


class StoreChangedError(Exception):
    """The store was replaced or began an epoch: what was read before is no part of it any more."""


class Found(NamedTuple):
    """A record as its tier names it. ``use_ns`` is the time of its last use in ns since 1970, 0 if
    it is not known; ``mark`` compares equal while it is the same record at the same place."""

    key: Key
    use_ns: int
    payload_bytes: int
    stored_bytes: int
    is_sealed: bool
    mark: bytes


class Health(enum.Enum):
    """What became of one record. ``GONE``: removed meanwhile. ``SEALED``: encrypted, and its key
    is not at hand."""

    GOOD = "good"
    DAMAGED = "damaged"
    GONE = "gone"
    SEALED = "sealed"


class OfflineStore(Protocol):
    """What can be done with a tier's folder from outside. Belongs to one thread; blocks."""

    kind: str
    folder: Path
    epoch: int
    is_shared: bool
    """Whether its tier is one that engines share, with epochs of their own."""
    capacity_bytes: int
    """What the tier was last opened with; 0 if that is not known."""

    @property
    def owner(self) -> Identity | None:
        """Whose records these are, as far as the store says so itself."""
        ...

    @property
    def file_bytes(self) -> int:
        """What its files take on the disk."""
        ...

    def count(self) -> int:
        """About how many records there are."""
        ...

    def batches(self) -> Iterator[list[Found]]:
        """Every record, some thousand at a time. Raises ``StoreChangedError``."""
        ...

    def find(self, key: Key) -> Found | None:
        """One record as it is now. Raises ``StoreChangedError``."""
        ...

    def load(self, found: Sequence[Found], into: Sequence[Buffer]) -> list[bool]:
        """Fill ``into[i]`` with the payload of ``found[i]``; whether it is whole and theirs."""
        ...

    def close(self) -> None:
        """Let everything go."""
        ...


class Checker:
    """Reads and verifies records of one store, with memory of its own."""

    def __init__(self, store: OfflineStore, *, has_key: bool) -> None:
        """``has_key``: whether encrypted records can be read."""
        self._store = store
        self._has_key = has_key
        self._scratch = Scratch()

    def check(self, found: Found) -> tuple[Health, Buffer]:
        """Whether a record is good, and its payload if so; valid until the next call.

        Raises ``StoreChangedError``.
        """
        nothing = self._scratch.data[:0]
        failed: bytes | None = None
        for _attempt in range(ATTEMPTS):
            if found.is_sealed and not self._has_key:
                return Health.SEALED, nothing
            if 0 < found.payload_bytes <= PAYLOAD_BYTES_MAX:
                payload = self._scratch.at_least(found.payload_bytes)
                if self._store.load([found], [payload])[0]:
                    return Health.GOOD, payload
            now = self._store.find(found.key)
            if now is None:
                return Health.GONE, nothing
            if now.mark == found.mark == failed:
                return Health.DAMAGED, nothing
            found, failed = now, found.mark
        return Health.GONE, nothing  # another one each time: its owner is writing it over and over

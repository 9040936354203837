"""Changes to the index of an LMDB tier, which I/O jobs and the event loop pass to a commit thread.

The commit threads of the exclusive tier and of the shared tier both accept them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiers.base import Key, WriteOutcome
from tiers.io.direct_io import pages_for
from tiers.io.extents import Extents, clip


@dataclass(slots=True, eq=False)
class Put:
    """A record on its way to the disk. It belongs to one thread at a time: the event loop's, an
    I/O thread, the commit thread, the event loop's again."""

    key: Key
    value: bytes
    epoch: int
    payload_bytes: int
    extents: Extents
    stored_pages: int = 0
    """The number of pages that the record needed after encoding."""
    outcome: WriteOutcome = WriteOutcome.FAILED
    is_named: bool = False
    """True if a committed transaction refers to its allocation."""
    waiters: list[Any] = field(default_factory=list)
    """The calls that wait for this record; only the event loop uses them."""

    def allocate(self, extents: Extents, epoch: int) -> None:
        """Set where its payload goes, and the epoch to seal it with."""
        self.extents, self.epoch = extents, epoch

    def encode(self, stored_bytes: int) -> Extents:
        """Set the length of the payload as it is stored. Returns the extents that it needs."""
        self.stored_pages = pages_for(stored_bytes)
        return clip(self.extents, self.stored_pages)[0]

    def seal(self, value: bytes) -> None:
        """Set its entry in the index."""
        self.value = value

    def commit(self) -> None:
        """Note that a committed transaction contains it."""
        self.is_named = True
        self.outcome = WriteOutcome.OK

    def end(self, outcome: WriteOutcome) -> None:
        """Set its outcome."""
        self.outcome = outcome


@dataclass(slots=True, eq=False)
class Remove:
    """Keys to delete, and the allocations that become free once that is durable."""

    keys: list[Key]
    allocations: list[Extents]


@dataclass(slots=True, eq=False)
class Refresh:
    """New values of present records, with a later time of use."""

    values: list[tuple[Key, bytes]]


@dataclass(slots=True, eq=False)
class Clear:
    """Delete everything and begin an epoch."""

    epoch: int


Change = Put | Remove | Refresh | Clear

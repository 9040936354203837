"""Changes to the index of an LMDB tier, which I/O jobs and the event loop hand to a commit thread.

The commit threads of the exclusive tier and of the shared tier both take them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiers.base import Key, WriteOutcome
from tiers.io.extents import Extents


@dataclass(slots=True, eq=False)
class Put:
    """A record whose payload is written but not yet flushed. The commit sets ``outcome``."""

    key: Key
    value: bytes
    epoch: int
    payload_bytes: int
    extents: Extents
    stored_pages: int = 0
    """The number of its pages that the record needed after encoding."""
    outcome: WriteOutcome = WriteOutcome.FAILED
    is_named: bool = False
    """True if a committed transaction names its allocation."""
    waiters: list[Any] = field(default_factory=list)
    """The calls that wait for this record; only the event loop uses them."""


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

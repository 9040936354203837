"""Changes to the index of an LMDB tier: what I/O jobs and the event loop hand to a commit thread.

Both commit threads take them, that of the exclusive tier and that of the shared tier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiers.base import Key, WriteOutcome
from tiers.io.extents import Extents


@dataclass(slots=True, eq=False)
class Put:
    """A record whose payload is written but not yet flushed. ``outcome`` is set by the commit."""

    key: Key
    value: bytes
    epoch: int
    payload_bytes: int
    extents: Extents
    stored_pages: int = 0
    """How many of its pages the record turned out to need."""
    outcome: WriteOutcome = WriteOutcome.FAILED
    is_named: bool = False
    """Whether a committed transaction names its place."""
    waiters: list[Any] = field(default_factory=list)
    """Whoever asked for it; the event loop's own."""


@dataclass(slots=True, eq=False)
class Remove:
    """Keys to forget, and the places that are free once that is durable."""

    keys: list[Key]
    allocations: list[Extents]


@dataclass(slots=True, eq=False)
class Refresh:
    """New values of present records (their recency)."""

    values: list[tuple[Key, bytes]]


@dataclass(slots=True, eq=False)
class Clear:
    """Forget everything and begin an epoch."""

    epoch: int


Change = Put | Remove | Refresh | Clear

"""What became of chunks that are not there any more: the most recent ones, with the cause.

Part of the planner, on its thread. Two generations of a dict keep memory bounded at the price of a
dict insertion per key, which is C speed for a whole batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

KEPT_MOST = 65_536
"""Keys that are remembered at least half of; about 11 MiB."""


class Cause(enum.Enum):
    """Why a chunk is in no tier, or not in this one."""

    EVICTED = "evicted"
    CORRUPT = "corrupt"
    LOST = "lost"
    FAILED = "failed"
    NO_ROOM = "no_room"
    NOT_ADMITTED = "not_admitted"
    CANCELLED = "cancelled"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Departure:
    """Cause, the tier's number, and when (seconds of the planner's clock)."""

    cause: Cause
    tier: int
    time_s: float


class Departures:
    """The last ``most`` keys or so, each with its latest departure."""

    def __init__(self, most: int = KEPT_MOST) -> None:
        self._most = most // 2
        self._young: dict[bytes, Departure] = {}
        self._old: dict[bytes, Departure] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, keys: Iterable[bytes], departure: Departure) -> None:
        """These keys have gone, or did not come."""
        self._young.update(dict.fromkeys(islice(keys, self._most), departure))
        if len(self._young) > self._most:
            self._old, self._young = self._young, {}

    def find(self, key: bytes) -> Departure | None:
        """The latest departure of a key, if it is remembered."""
        return self._young.get(key) or self._old.get(key)

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = {}, {}

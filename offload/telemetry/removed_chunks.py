"""Remembers the chunks that left the tiers most recently, both in order and by key with the cause.

Owned by the planner and used on its thread. ``RemovalLog`` is one bounded log of all tiers. Lookups
that remember their results read it; a lookup that reads it too late starts again. ``RemovalCauses``
keeps one dict per batch of removed chunks and drops the oldest batch: a dict is built at C speed,
and none grows large enough to be slow.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

REMOVALS_MAX = 16_384
"""Number of keys that are kept in the log; one step evicts at most a thousand."""


class RemovalLog:
    """Logs roughly the last ``keys_max`` keys that left a tier; another tier may still have them.

    ``count`` is the number of removals so far, and can be passed to ``since`` later as a mark.
    """

    def __init__(self, keys_max: int = REMOVALS_MAX) -> None:
        self.count = 0
        self._keys_max = keys_max
        self._batches: deque[Sequence[bytes]] = deque()
        self._forgotten = 0  # ``count`` before the first remembered batch

    def note(self, keys: Collection[bytes]) -> None:
        """Record removed chunks."""
        if not keys:
            return
        self._batches.append(tuple(keys))
        self.count += len(keys)
        while self.count - self._forgotten > self._keys_max:
            self._forgotten += len(self._batches.popleft())

    def note_all(self) -> None:
        """Record that a tier has lost everything."""
        self._batches.clear()
        self.count += 1
        self._forgotten = self.count

    def since(self, mark: int) -> list[Sequence[bytes]] | None:
        """The chunks removed since ``count`` was ``mark``, possibly with some earlier ones;
        ``None`` if they are no longer known."""
        if mark < self._forgotten:
            return None
        left, found = self.count - mark, []
        for batch in reversed(self._batches):
            if left <= 0:
                break
            found.append(batch)
            left -= len(batch)
        return found


REMEMBERED_MAX = 65_536
"""Number of keys that are remembered; about 11 MiB."""
PART_MAX = 512
"""Maximum number of keys in a dict that small batches share."""


class Cause(enum.Enum):
    """The reason why a chunk left a tier, or did not enter it."""

    EVICTED = "evicted"
    CORRUPT = "corrupt"
    LOST = "lost"
    FAILED = "failed"
    NO_SPACE = "no_room"
    NOT_ADMITTED = "not_admitted"
    CANCELLED = "cancelled"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Removed:
    """The cause, the tier's number, and the time (seconds of the planner's clock)."""

    cause: Cause
    tier: int
    time_s: float


class RemovalCauses:
    """Remembers roughly the last ``keys_max`` keys, each with its latest removal."""

    def __init__(self, keys_max: int = REMEMBERED_MAX) -> None:
        self._keys_max = keys_max
        self._part_max = min(PART_MAX, keys_max // 2)
        self._parts: deque[dict[bytes, Removed]] = deque()  # newest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def note(self, keys: Iterable[bytes], departure: Removed) -> None:
        """Record keys that were removed from a tier, or did not enter one."""
        gone = dict.fromkeys(islice(keys, self._keys_max), departure)
        if not gone:
            return
        if self._parts and len(self._parts[0]) + len(gone) <= self._part_max:
            self._count -= len(self._parts[0])
            self._parts[0].update(gone)
        else:
            self._parts.appendleft(gone)
        self._count += len(self._parts[0])
        while self._count > self._keys_max:
            self._count -= len(self._parts.pop())

    def find(self, key: bytes) -> Removed | None:
        """The latest removal of a key, if it is remembered."""
        return next((part[key] for part in self._parts if key in part), None)

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()
        self._count = 0

"""What has left the tiers lately, for whoever remembers what he has found there.

Part of the planner, on its thread. One log of all tiers, bounded: who comes too late to it must
look again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

KEPT_MOST = 16_384
"""Keys of which is known that they have left; a step evicts a thousand at most."""


class Removals:
    """The last ``most`` keys or so that a tier cannot give any more, though another may. ``count``
    is how many have left ever: a mark, to be given to ``since`` later."""

    def __init__(self, most: int = KEPT_MOST) -> None:
        self.count = 0
        self._most = most
        self._batches: deque[Sequence[bytes]] = deque()
        self._forgotten = 0  # of ``count``, those before the first batch

    def note(self, keys: Collection[bytes]) -> None:
        """These have left."""
        if not keys:
            return
        self._batches.append(tuple(keys))
        self.count += len(keys)
        while self.count - self._forgotten > self._most:
            self._forgotten += len(self._batches.popleft())

    def note_all(self) -> None:
        """A tier has lost everything."""
        self._batches.clear()
        self.count += 1
        self._forgotten = self.count

    def since(self, mark: int) -> list[Sequence[bytes]] | None:
        """What has left since ``count`` was ``mark``, perhaps with some that had left before;
        ``None`` if that is not known any more."""
        if mark < self._forgotten:
            return None
        left, found = self.count - mark, []
        for batch in reversed(self._batches):
            if left <= 0:
                break
            found.append(batch)
            left -= len(batch)
        return found

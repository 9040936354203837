"""Epochs that could not be written when the weights changed: tried again until they are.

Without an epoch of its own a tier is neither written nor read. The others go on.

Ownership: ``owe``, ``settle`` and ``take`` belong to the scheduler's thread; ``bump`` runs on a
thread of its own, which a disk that hangs may keep for ever. What it has written comes back by a
deque.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_S = 5.0


class OwedEpochs:
    """``bump(tier)`` begins a new epoch of a tier durably and returns it, or raises."""

    def __init__(self, bump: Callable[[int], int], retry_s: float = RETRY_S) -> None:
        self._bump = bump
        self._retry_s = retry_s
        self._owed: set[int] = set()
        self._written: deque[tuple[int, int]] = deque()
        self._closed = threading.Event()

    def owe(self, tier: int, error: Exception) -> None:
        """The epoch of this tier could not be written."""
        logger.error(
            "kvtiers: tier %d could not be told that the weights have changed (%s). It is not used "
            "until it can; if the server ends before, clear its folder",
            tier,
            error,
        )
        if tier not in self._owed:
            self._owed.add(tier)
            threading.Thread(
                target=self._try, args=(tier,), name="kvtiers-epoch", daemon=True
            ).start()

    def take(self) -> dict[int, int]:
        """Epochs that were written since the last call, by tier."""
        found = {}
        while self._written:
            tier, epoch = self._written.popleft()
            self._owed.discard(tier)
            found[tier] = epoch
            logger.warning("kvtiers: tier %d knows now that the weights have changed", tier)
        return found

    def close(self) -> None:
        """Stop trying."""
        self._closed.set()

    def _try(self, tier: int) -> None:
        while not self._closed.wait(self._retry_s):
            try:
                self._written.append((tier, self._bump(tier)))
                return
            except Exception as error:  # whatever it is, the disk is not back yet
                logger.debug("kvtiers: tier %d: %s", tier, error)

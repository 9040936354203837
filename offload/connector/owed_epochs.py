"""Epochs of the lower tiers: begun when the weights change, and owed to a tier that is away.

A tier that does not know its epoch is neither written nor read. The others go on.

Ownership: ``begin`` and ``take`` belong to the scheduler's thread. What is owed is tried on a
thread of its own, which a disk that hangs may keep for ever; what it has begun comes back by a
deque.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

RETRY_S = 5.0


class OwedEpochs:
    """``begin_one(tier)`` begins a new epoch of a tier durably and returns it, or raises."""

    def __init__(self, begin_one: Callable[[int], int], retry_s: float = RETRY_S) -> None:
        self._begin_one = begin_one
        self._retry_s = retry_s
        self._owed: set[int] = set()
        self._begun: deque[tuple[int, int]] = deque()
        self._closed = threading.Event()

    def begin(self, tiers: Iterable[int]) -> dict[int, int]:
        """New epochs of ``tiers``, but for those that cannot be told now."""
        found = {}
        for tier in tiers:
            try:
                found[tier] = self._begin_one(tier)
                self._owed.discard(tier)
            except Exception as error:  # the other tiers must not wait for this one
                self._owe(tier, error)
        return found

    def take(self) -> dict[int, int]:
        """Owed epochs that were begun since the last call, by tier."""
        found = {}
        while self._begun:
            tier, epoch = self._begun.popleft()
            if tier in self._owed:  # else a later reset has told it, and it is in use again
                self._owed.discard(tier)
                found[tier] = epoch
                logger.warning("kvtiers: tier %d knows now that the weights have changed", tier)
        return found

    def close(self) -> None:
        """Stop trying."""
        self._closed.set()

    def _owe(self, tier: int, error: Exception) -> None:
        logger.error(
            "kvtiers: tier %d could not be told that the weights have changed (%s). It is not used "
            "until it can be; if the server ends before, clear its folder",
            tier,
            error,
        )
        if tier not in self._owed:
            self._owed.add(tier)
            name = f"kvtiers-epoch-{tier}"
            threading.Thread(target=self._try, args=(tier,), name=name, daemon=True).start()

    def _try(self, tier: int) -> None:
        while not self._closed.wait(self._retry_s):
            try:
                self._begun.append((tier, self._begin_one(tier)))
                return
            except Exception as error:  # whatever it is, the disk is not back yet
                logger.debug("kvtiers: tier %d: %s", tier, error)

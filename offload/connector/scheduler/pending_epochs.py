"""Begins new epochs of the lower tiers when the weights change, even while a tier's disk is
unavailable.

A tier whose new epoch is not durable is neither written nor read. The other tiers continue.

Ownership: ``reset``, ``take``, ``close`` and ``_owed`` belong to the scheduler's thread. Each tier
has a separate thread, which a hanging disk may block without end; no other code here touches a
disk. The threads report their results through the condition.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

RETRY_S = 5.0
WAIT_S = 0.5
"""The longest time that a reset waits for the disks. See docs/decisions/0063."""

BeginOne = Callable[[int, Callable[[], None]], int]


class _Attempt:
    """One attempt to begin an epoch of one tier.

    ``is_noted``: true once a server that starts would see the new epoch, even if this process is
    killed; ``epoch`` is known when it is durable; ``error`` is the last failure. The condition
    guards all fields except ``was_waited_for``.
    """

    __slots__ = ("epoch", "error", "is_noted", "is_withdrawn", "was_waited_for")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.error = ""
        self.is_noted = False
        self.was_waited_for = False
        self.is_withdrawn = False
        """The weights have not changed after all. Written by the scheduler's thread."""

    @property
    def is_over(self) -> bool:
        """True if there is no point in waiting longer now."""
        return self.epoch is not None or bool(self.error)


class PendingEpochs:
    """Begins epochs of ``tiers`` tiers.

    ``begin_one(tier, noted)`` begins a new epoch of a tier durably and returns it, or raises; it
    calls ``noted`` as soon as a server that starts would see the epoch.
    ``take_back_one(tier, epoch)`` restores the epoch before one that nobody has used.
    """

    def __init__(
        self,
        tiers: int,
        begin_one: BeginOne,
        retry_s: float = RETRY_S,
        take_back_one: Callable[[int, int], None] = lambda tier, epoch: None,
    ) -> None:
        self._begin_one = begin_one
        self._take_back_one = take_back_one
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._owed: dict[int, _Attempt] = {}
        self._asked: list[SimpleQueue[_Attempt | None]] = [SimpleQueue() for _ in range(tiers)]
        for tier in range(tiers):
            work = partial(self._run, tier)
            threading.Thread(target=work, name=f"kvtiers-epoch-{tier}", daemon=True).start()

    def reset(self, wait_s: float = WAIT_S) -> bool:
        """Request new epochs in all tiers; return whether all tiers have recorded the request.

        Waits at most ``wait_s`` seconds in total, and waits for each attempt only once. An attempt
        whose epoch ``take`` has not returned yet also serves this reset, because nothing was
        written under that epoch.
        """
        for tier, asked in enumerate(self._asked):
            if tier not in self._owed:
                self._owed[tier] = _Attempt()
                asked.put(self._owed[tier])
        new = [attempt for attempt in self._owed.values() if not attempt.was_waited_for]
        with self._changed:
            self._changed.wait_for(lambda: all(attempt.is_over for attempt in new), wait_s)
            missing = [tier for tier, attempt in self._owed.items() if not attempt.is_noted]
        for attempt in new:
            attempt.was_waited_for = True
        if missing:
            logger.error(
                "kvtiers: tiers %s have not recorded that the weights have changed. They are not "
                "used until they have; if the server ends before that, clear their folders",
                missing,
            )
        return not missing

    def take(self) -> dict[int, int]:
        """Return the epochs that have become durable since the previous call, by tier."""
        if not self._owed:
            return {}
        with self._changed:
            found = {
                tier: attempt.epoch
                for tier, attempt in self._owed.items()
                if attempt.epoch is not None
            }
        for tier in found:
            del self._owed[tier]
        return found

    def withdraw(self) -> None:
        """Keep the current epochs, because the weights have not changed: cancel the epochs that
        ``take`` has not returned. Does not wait. If the process ends before the old epoch is back
        on the disk, or if the disk fails, the next server begins with an empty tier."""
        for tier, attempt in self._owed.items():
            attempt.is_withdrawn = True
            self._asked[tier].put(attempt)
        self._owed.clear()

    def close(self) -> None:
        """Stop trying."""
        self._closed.set()
        for asked in self._asked:
            asked.put(None)

    # -- the thread of one tier -----------------------------------------------------------------

    def _run(self, tier: int) -> None:
        while (attempt := self._asked[tier].get()) is not None:
            if attempt.is_withdrawn:
                self._take_back(tier, attempt)
            else:
                self._try(tier, attempt)

    def _take_back(self, tier: int, attempt: _Attempt) -> None:
        if attempt.epoch is None:  # the new epoch was not begun
            return
        try:
            self._take_back_one(tier, attempt.epoch)
        except Exception as error:  # any error costs only the tier's content after a restart
            text = "kvtiers: tier %d will be empty after a restart: its epoch was not restored: %s"
            logger.warning(text, tier, error)

    def _try(self, tier: int, attempt: _Attempt) -> None:
        while not (self._closed.is_set() or attempt.is_withdrawn):
            try:
                epoch = self._begin_one(tier, partial(self._log, attempt, is_noted=True))
            except Exception as error:  # any error means that the disk is not back yet
                if not attempt.error:
                    logger.error("kvtiers: cannot begin an epoch of tier %d: %s", tier, error)
                self._log(attempt, error=str(error) or repr(error))
                self._closed.wait(self._retry_s)
            else:
                self._log(attempt, is_noted=True, epoch=epoch)
                if attempt.error:
                    text = "kvtiers: tier %d has recorded that the weights have changed"
                    logger.warning(text, tier)
                return

    def _log(self, attempt: _Attempt, **what: Any) -> None:
        with self._changed:
            for name, value in what.items():
                setattr(attempt, name, value)
            self._changed.notify_all()

"""Epochs of the lower tiers: begun when the weights change, and owed to a tier that is away.

A tier that does not know its epoch is neither written nor read. The others go on.

Ownership: ``reset``, ``take``, ``close`` and ``_owed`` belong to the scheduler's thread. Each tier
has a thread of its own, which a disk that hangs may keep for ever: nothing else touches a disk
here. What the threads say crosses by the condition.
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
"""The longest that a reset waits for the disks. See docs/decisions/0063."""

BeginOne = Callable[[int, Callable[[], None]], int]


class _Attempt:
    """To begin one epoch of one tier. ``is_noted``: a server that starts now finds it, also if this
    process is killed; ``epoch`` is known when it is durable; ``error`` says why it was not the last
    time. Guarded by the condition, but for ``was_waited_for``."""

    __slots__ = ("epoch", "error", "is_noted", "was_waited_for")

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.error = ""
        self.is_noted = False
        self.was_waited_for = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for at present."""
        return self.epoch is not None or bool(self.error)


class PendingEpochs:
    """For ``tiers`` tiers. ``begin_one(tier, noted)`` begins a new epoch of a tier durably and
    returns it, or raises; it calls ``noted`` as soon as a server that starts would find it."""

    def __init__(self, tiers: int, begin_one: BeginOne, retry_s: float = RETRY_S) -> None:
        self._begin_one = begin_one
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._owed: dict[int, _Attempt] = {}
        self._asked: list[SimpleQueue[_Attempt | None]] = [SimpleQueue() for _ in range(tiers)]
        for tier in range(tiers):
            work = partial(self._run, tier)
            threading.Thread(target=work, name=f"kvtiers-epoch-{tier}", daemon=True).start()

    def reset(self, wait_s: float = WAIT_S) -> bool:
        """New epochs are due in all tiers. Returns whether all have noted that; waits for them at
        most ``wait_s`` seconds, and for each attempt once.

        An attempt that ``take`` has not given out yet is as good for this reset as for the one
        before: nothing was written under its epoch.
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
                "kvtiers: tiers %s have not noted that the weights have changed. They are not used "
                "until they have; if the server ends before, clear their folders",
                missing,
            )
        return not missing

    def take(self) -> dict[int, int]:
        """The epochs that have become durable since the last call, by tier."""
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

    def close(self) -> None:
        """Stop trying."""
        self._closed.set()
        for asked in self._asked:
            asked.put(None)

    # -- a tier's own thread -----------------------------------------------------------------

    def _run(self, tier: int) -> None:
        while (attempt := self._asked[tier].get()) is not None:
            self._try(tier, attempt)

    def _try(self, tier: int, attempt: _Attempt) -> None:
        while not self._closed.is_set():
            try:
                epoch = self._begin_one(tier, partial(self._say, attempt, is_noted=True))
            except Exception as error:  # whatever it is, the disk is not back yet
                if not attempt.error:
                    logger.error("kvtiers: an epoch of tier %d cannot be begun: %s", tier, error)
                self._say(attempt, error=str(error) or repr(error))
                self._closed.wait(self._retry_s)
            else:
                self._say(attempt, is_noted=True, epoch=epoch)
                if attempt.error:
                    text = "kvtiers: tier %d has noted that the weights have changed"
                    logger.warning(text, tier)
                return

    def _say(self, attempt: _Attempt, **what: Any) -> None:
        with self._changed:
            for name, value in what.items():
                setattr(attempt, name, value)
            self._changed.notify_all()

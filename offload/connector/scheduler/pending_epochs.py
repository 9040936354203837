"""Begins new epochs of the lower tiers when the weights change, even while a tier's disk is
unavailable.

A tier whose new epoch is not durable is neither written nor read. The other tiers continue.

Ownership: ``reset``, ``take``, ``withdraw``, ``close`` and ``_pending`` belong to the scheduler's
thread. Each tier has an executor with one daemon thread, which a hanging disk may block without
end; no other code here touches a disk. The threads report their results through the attempts, whose
condition they share.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiers.io.threads import DaemonExecutor

logger = logging.getLogger(__name__)

EPOCH_RETRY_S = 5.0
EPOCH_WAIT_S = 0.5
"""The longest time that a reset waits for the disks. See docs/decisions/0063."""

BeginOne = Callable[[int, Callable[[], None]], int]


class _Attempt:
    """One attempt to begin an epoch of one tier.

    ``is_noted``: true once a server that starts would see the new epoch, even if this process is
    killed; ``epoch`` is known when it is durable; ``error`` is the last failure. The tier's thread
    sets these under the condition. ``is_final``: the weights have changed for certain;
    ``is_withdrawn``: they have not changed after all. The scheduler's thread sets these two and
    ``was_waited_for``.
    """

    __slots__ = (
        "_changed",
        "epoch",
        "error",
        "is_final",
        "is_noted",
        "is_withdrawn",
        "was_waited_for",
    )

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.epoch: int | None = None
        self.error = ""
        self.is_noted = False
        self.was_waited_for = False
        self.is_final = False
        self.is_withdrawn = False

    @property
    def is_over(self) -> bool:
        """True if there is no point in waiting longer now."""
        return self.epoch is not None or bool(self.error)

    def note(self) -> None:
        """Record that a server that starts would see the new epoch from now on."""
        with self._changed:
            self.is_noted = True

    def succeed(self, epoch: int) -> None:
        """Record that the new epoch is durable."""
        with self._changed:
            self.is_noted, self.epoch = True, epoch
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Record that the epoch could not be begun yet."""
        with self._changed:
            self.error = str(error) or repr(error)
            self._changed.notify_all()


class PendingEpochs:
    """Begins epochs of ``tiers`` tiers.

    ``begin_one(tier, noted)`` begins a new epoch of a tier durably and returns it, or raises; it
    calls ``noted`` as soon as a server that starts would see the epoch.
    ``take_back_one(tier, epoch)`` restores the epoch before ``epoch``, which was never used.
    """

    def __init__(
        self,
        tiers: int,
        begin_one: BeginOne,
        retry_s: float = EPOCH_RETRY_S,
        take_back_one: Callable[[int, int], None] = lambda tier, epoch: None,
    ) -> None:
        self._begin_one = begin_one
        self._take_back_one = take_back_one
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._pending: dict[int, _Attempt] = {}
        self._disks = [DaemonExecutor(f"kvtiers-epoch-{tier}") for tier in range(tiers)]

    def reset(self, wait_s: float = EPOCH_WAIT_S) -> bool:
        """Request new epochs in all tiers; return whether all tiers have recorded the request.

        Waits at most ``wait_s`` seconds in total, and waits for each attempt only once. An attempt
        whose epoch ``take`` has not returned yet also serves this reset, because nothing was
        written under that epoch.
        """
        for tier, disk in enumerate(self._disks):
            if tier not in self._pending:
                attempt = self._pending[tier] = _Attempt(self._changed)
                disk.submit(self._try, tier, attempt)
        new = [attempt for attempt in self._pending.values() if not attempt.was_waited_for]
        with self._changed:
            self._changed.wait_for(lambda: all(attempt.is_over for attempt in new), wait_s)
            missing = [tier for tier, attempt in self._pending.items() if not attempt.is_noted]
        for attempt in new:
            attempt.was_waited_for = True
        if missing:
            logger.error(
                "kvtiers: tiers %s have not recorded that the weights have changed. They are not "
                "used until they have recorded it. If the server ends first, clear their folders",
                missing,
            )
        return not missing

    def take(self) -> dict[int, int]:
        """Return the epochs that have become durable since the previous call, by tier. From now on
        the others cannot be withdrawn."""
        if not self._pending:
            return {}
        with self._changed:
            found = {
                tier: attempt.epoch
                for tier, attempt in self._pending.items()
                if attempt.epoch is not None
            }
        for tier in found:
            del self._pending[tier]
        for attempt in self._pending.values():
            attempt.is_final = True
        return found

    def withdraw(self) -> None:
        """Keep the current epochs, because the weights have not changed: cancel the epochs that
        were requested since the last ``take``. Does not wait. If the process ends before the old
        epoch is back on the disk, or if the disk fails, the next server begins with an empty
        tier."""
        for tier, attempt in list(self._pending.items()):
            if not attempt.is_final:
                attempt.is_withdrawn = True
                del self._pending[tier]
                self._disks[tier].submit(self._take_back, tier, attempt)

    def close(self) -> None:
        """Stop trying. Does not wait for a thread whose disk hangs."""
        self._closed.set()
        for disk in self._disks:
            disk.shutdown(wait=False)

    # -- the thread of one tier -----------------------------------------------------------------

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
                epoch = self._begin_one(tier, attempt.note)
            except Exception as error:  # after any error: the disk is not back yet
                if not attempt.error:
                    logger.error("kvtiers: cannot begin an epoch of tier %d: %s", tier, error)
                attempt.fail(error)
                self._closed.wait(self._retry_s)
            else:
                attempt.succeed(epoch)
                if attempt.error:
                    text = "kvtiers: tier %d has recorded that the weights have changed"
                    logger.warning(text, tier)
                return

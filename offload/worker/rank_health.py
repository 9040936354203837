"""Decides whether a rank may store, and checks whether its loop still runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 60.0
"""Time for which a rank stores nothing after a fault."""


class RankHealth:
    """The health of one rank.

    ``degraded`` is the reason why it stores nothing at present; ``is_stalled`` means that the loop
    has not answered a ping.

    Ownership: the loop and the model-runner thread may call ``degrade``; ``_note_turn`` belongs to
    the loop, everything else to the model-runner thread. Times are in monotonic seconds.
    """

    def __init__(self) -> None:
        self.degraded = ""
        self.is_stalled = False
        self._has_answered = False
        self._paused_until = 0.0

    def degrade(self, why: str, now: float, pause_s: float = PAUSE_S) -> None:
        """Stop stores for ``pause_s``; loads continue as long as they work. Logs one line."""
        self._paused_until = max(self._paused_until, now + pause_s)
        if not self.degraded:
            self.degraded = why
            logger.error("kvtiers: offloading is degraded on this rank: %s", why)

    def suspect(
        self, call_soon: Callable[[Callable[[], None]], object], late: int, now: float
    ) -> None:
        """Ping the loop, because ``late`` loads did not end in time.

        The ping goes through the loop's ``call_soon_threadsafe``, so the loop answers it after
        everything that was posted before.
        """
        self.degrade(f"{late} loads did not end in time; the event loop may be blocked", now, 0.0)
        if not self.is_stalled:
            self.is_stalled, self._has_answered = True, False
            with contextlib.suppress(RuntimeError):  # the loop is closed and will never answer
                call_soon(self._note_turn)

    def check_loop(self, now: float) -> None:
        """Check whether the loop has answered, and whether stores may resume."""
        if self.is_stalled and self._has_answered:
            self.is_stalled = False
        if self.degraded and not self.is_stalled and now >= self._paused_until:
            why, self.degraded = self.degraded, ""
            logger.warning("kvtiers: this rank stores again; it was degraded because %s", why)

    def _note_turn(self) -> None:
        self._has_answered = True

"""Answers whether a worker still has the weights that it had before it slept.

This is the workers' half of `offload.connector.scheduler.cache_resets`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from offload.connector.metadata import WeightsAnswer

logger = logging.getLogger(__name__)


class WeightsWatch:
    """Belongs to the model runner's thread. ``digest`` returns a digest of the current weights, or
    ``None`` if they cannot be digested; they then count as changed."""

    def __init__(self, digest: Callable[[], bytes | None]) -> None:
        self._digest = digest
        self._known: bytes | None = None
        self._sleeps = 0
        self._answered = 0

    def begin(self) -> None:
        """Record that the weights are loaded."""
        self._known = self._current()

    def fell_asleep(self) -> None:
        """Record that this worker's memory is about to be unmapped."""
        self._sleeps += 1

    def answer(self, question: int) -> WeightsAnswer | None:
        """Answer a query of the scheduler, once. Call this during the step that sends the query:
        its forward pass uses the weights that are digested here."""
        if not question or question == self._answered:
            return None
        now = self._current()
        is_same = now is not None and now == self._known
        answer = WeightsAnswer(question, 1, self._sleeps, is_same)
        self._known, self._sleeps, self._answered = now, 0, question
        return answer

    def _current(self) -> bytes | None:
        try:
            return self._digest()
        except Exception as error:  # unknown weights count as changed
            logger.warning("kvtiers: the weights in memory cannot be digested: %r", error)
            return None

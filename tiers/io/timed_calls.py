"""Calls to a store that may hang: each has a deadline, and their number is limited.

Belongs to the event loop's thread; the calls run in daemon threads. A call that is abandoned
continues to run, so it must not use the caller's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from tiers.base import TierIoError
from tiers.io.threads import DaemonThreads

ANSWER_TIMEOUT_S = 2.0
UNANSWERED_CALLS_MAX = 8
"""Maximum number of calls that have not returned, including those that wait for a thread. A further
call fails at once."""

T = TypeVar("T")


class TimedCalls:
    """``name`` names the threads, ``count`` is their number; ``store`` names the store in
    messages."""

    def __init__(self, name: str, count: int, store: str) -> None:
        self._threads = DaemonThreads(name, count)
        self._store = store
        self._unanswered = 0

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``function``. Raises whatever the function raises, and
        ``TierIoError`` if it does not return in time or too many calls are unanswered."""
        if self._unanswered >= UNANSWERED_CALLS_MAX:
            raise TierIoError(f"earlier calls to {self._store} have not returned yet")
        answer = self._threads.run(function, *arguments)
        self._unanswered += 1
        answer.add_done_callback(self._end)
        done, _ = await asyncio.wait([answer], timeout=ANSWER_TIMEOUT_S)
        if not done:
            raise TierIoError(f"{self._store} does not answer")
        return answer.result()

    def stop(self) -> None:
        """End the threads. Blocks as long as a call hangs."""
        self._threads.stop()

    def _end(self, answer: asyncio.Future[T]) -> None:
        self._unanswered -= 1
        if not answer.cancelled():
            answer.exception()  # otherwise asyncio logs an exception that was never retrieved

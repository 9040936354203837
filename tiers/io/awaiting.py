"""Waits for threads, even if the caller is cancelled, and for several records at once.

Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Waiters = list[tuple["Call", int]]


async def settled(future: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Return the result of ``future``. If the caller is cancelled, call ``on_cancel``, still wait
    for the end, and only then raise ``CancelledError``."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    return future.result()


def from_threads(function: Callable[[T], object]) -> Callable[[T], None]:
    """Wrap ``function``, which must run on the current loop, so that other threads can call it. A
    call is dropped if the loop has been closed."""
    loop = asyncio.get_running_loop()

    def post(value: T) -> None:
        try:
            loop.call_soon_threadsafe(function, value)
        except RuntimeError:
            # The loop was closed while a tier was open: nothing waits for this.
            return

    return post


class Call:
    """One public call and the outcomes of its records. ``done`` is set after ``begun`` when every
    expected record has an outcome."""

    __slots__ = ("_left", "done", "outcomes")

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        self._left = 1  # for begun()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def expect(self, waiters: Waiters, position: int) -> None:
        """Wait for one more record, whose outcome goes to this position."""
        self._left += 1
        waiters.append((self, position))

    def begun(self) -> None:
        """Declare that no more records will be expected."""
        self._count_down()

    def _count_down(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.set_result(None)

    @staticmethod
    def settle(waiters: Waiters, outcome: object) -> None:
        """Pass the outcome of a finished record to all calls that wait for it."""
        for call, position in waiters:
            call.outcomes[position] = outcome
            call._count_down()
        waiters.clear()

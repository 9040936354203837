"""An asyncio loop whose time jumps to the next timer, so that hours pass in milliseconds.

``loop.time()`` starts at 0 and moves only when nothing is ready to run. While real threads work for
the loop (a real disk tier), time stops until they have finished: see ``outside``.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.patience import PATIENCE_S

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.outside = self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        if self.outside:
            ready = super().select(0.0 if timeout == 0.0 else PATIENCE_S)
            if not ready and timeout != 0.0:
                raise AssertionError(f"no answer from a thread for {PATIENCE_S} real seconds")
            return ready
        if timeout is None:
            raise AssertionError("deadlock: nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; runs on the thread that created it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._thread = threading.get_ident()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @property
    def turns(self) -> int:
        """The number of iterations of the loop."""
        return self._jumping.turns

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """From the loop's own thread, this does not write to its pipe."""
        if threading.get_ident() == self._thread:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, real threads work for the loop: virtual time stops and the loop really waits."""
        self._jumping.outside += 1
        try:
            yield
        finally:
            self._jumping.outside -= 1


def run_virtually(coroutine: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time. Everything that still runs at the end is cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(_cancel_all())
        with loop.outside():
            loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)

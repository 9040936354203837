"""Runs a coroutine of a command that Ctrl-C may end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_interrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a new event loop, and return its result.

    The first Ctrl-C cancels the coroutine, which cleans up, and then ``KeyboardInterrupt`` is
    raised; a second one raises it at once. ``asyncio.run`` cancels inside the signal handler, even
    while the loop is passing a result to a future; the loop then prints an ``InvalidStateError``.
    Here the loop itself cancels, between two callbacks. A thread other than the main one gets no
    Ctrl-C.
    """
    presses = 0

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            nonlocal presses
            presses += 1
            if presses > 1:
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await coroutine
        finally:
            signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if presses:
            raise KeyboardInterrupt from None
        raise

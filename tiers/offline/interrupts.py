"""Runs a coroutine of a command that Ctrl-C may end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_interrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a new event loop, and return its result.

    The first Ctrl-C cancels the coroutine, which cleans up, and then ``KeyboardInterrupt`` is
    raised; a second one raises it at once. ``asyncio.run`` cancels inside the signal handler, even
    while the loop is passing a result to a future; the loop then prints an ``InvalidStateError``.
    Here the loop itself cancels, between two callbacks. While the loop is made or closed, Ctrl-C
    waits, because Python prints an error about a loop that is left half-way. A thread other than
    the main one gets no Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    presses = 0
    cancel: Callable[[], object] | None = None

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt
        if cancel is not None:
            cancel()

    async def cancellable() -> T:
        nonlocal cancel
        task = asyncio.current_task()
        assert task is not None
        cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if presses:
            task.cancel()
        try:
            return await coroutine
        finally:
            cancel = None

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        found = asyncio.run(cancellable())
    except asyncio.CancelledError:
        if not presses:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if presses:
        raise KeyboardInterrupt
    return found

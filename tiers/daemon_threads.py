"""Blocking functions in threads that never keep the process from exiting.

``asyncio.to_thread`` uses threads that the interpreter joins when it ends: one that hangs in a
system call on a dead disk would hold up the end of the server for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run a blocking function in a daemon thread of its own; what it returns or raises.

    For what is rare (opening, closing, growing a file): each call starts a thread. Cancelling the
    future does not end the function; what it answers after that, or after the loop was closed, is
    lost.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(call: Callable[[], None]) -> None:
        if not done.done():
            call()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # the caller's to handle, whatever it is
            answer = _bound(done.set_exception, error)
        else:
            answer = _bound(done.set_result, result)
        try:
            loop.call_soon_threadsafe(settle, answer)
        except RuntimeError:
            return  # the loop was closed: nobody is left to tell

    name = getattr(function, "__name__", "blocking")
    threading.Thread(target=run, name=f"tier-{name}", daemon=True).start()
    return done


def _bound(call: Callable[[T], None], value: T) -> Callable[[], None]:
    return lambda: call(value)

"""Runs blocking functions in threads that never prevent the process from exiting.

``asyncio.to_thread`` uses threads that the interpreter joins at exit: one thread that hangs in a
system call on a dead disk would block the exit of the server forever. All users of the loop also
share those threads, so a few hung calls would stop everything.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run a blocking function in a new daemon thread; the future gets its result or exception.

    Each call starts a thread, so use it for rare work (opening, closing, growing a file).
    Cancelling the future does not stop the function; its result is then dropped, as it is after the
    loop was closed.
    """
    done, run = _prepared(function, arguments)
    name = getattr(function, "__name__", "blocking")
    threading.Thread(target=run, name=f"tier-{name}", daemon=True).start()
    return done


def start_all(threads: list[threading.Thread], stop: Callable[[], None]) -> None:
    """Start the threads. If the process cannot start more threads, call ``stop`` with only the
    started ones left in ``threads``, and raise ``RuntimeError``."""
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        threads[:] = [thread for thread in threads if thread.is_alive()]
        stop()
        raise


class DaemonThreads:
    """``count`` daemon threads for many short functions. Belongs to the event loop's thread."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        start_all(self._threads, self.stop)

    def run(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Run a function like ``in_thread``, as soon as a thread is free."""
        done, run = _prepared(function, arguments)
        self._queue.put(run)
        return done

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # the function holds the caller's buffers

    def stop(self) -> None:
        """Finish the queued work and end the threads. Blocks as long as a thread hangs."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


class DaemonExecutor(Executor):
    """One daemon thread for ``loop.run_in_executor``, for example of ``aiofiles``."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a blocking function as soon as the thread is free."""
        done: Future[T] = Future()
        self._queue.put(partial(_settle, done, partial(fn, *args, **kwargs)))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the queued calls. Blocks, with ``wait``, for as long as one hangs."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # the function holds the caller's buffers


def _settle(done: Future[Any], function: Callable[[], Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # the caller handles every error
        done.set_exception(error)
    else:
        done.set_result(result)


def _prepared(
    function: Callable[..., T], arguments: tuple[object, ...]
) -> tuple[asyncio.Future[T], Callable[[], None]]:
    """Return a future of the running loop, and the function that a thread calls to complete it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # what the function returned

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # the caller handles it
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop was closed: nothing waits for the result

    return done, run

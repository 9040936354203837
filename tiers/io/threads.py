"""Threads of the tiers: blocking functions, I/O jobs, and waiting for both on the event loop.

No thread here prevents the process from exiting. ``asyncio.to_thread`` uses threads that the
interpreter joins at exit: one thread that hangs in a system call on a dead disk would block the
exit of the server forever. All users of the loop also share those threads, so a few hung calls
would stop everything.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from tiers.io.direct_io import Scratch

P = ParamSpec("P")
T = TypeVar("T")
Waiters = list[tuple["Call", int]]
REPORTED_MIN = 64
"""Handling fewer records takes less time than a message to the event loop."""


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
    """Start the threads. If the process cannot start all of them, remove those that did not start
    from ``threads``, call ``stop``, and raise ``RuntimeError``."""
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        threads[:] = [thread for thread in threads if thread.is_alive()]
        stop()
        raise


def stop_all(threads: list[threading.Thread], jobs: queue.SimpleQueue[Any]) -> None:
    """Finish the queued jobs and end the threads, each of which ends after a job ``None``. Blocks
    as long as a thread hangs."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()


class DaemonThreads:
    """``count`` daemon threads for many short functions. Belongs to the event loop's thread."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        names = [name] if count == 1 else [f"{name}-{n}" for n in range(count)]
        self._threads = [
            threading.Thread(target=self._run, name=each, daemon=True) for each in names
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
        stop_all(self._threads, self._queue)


class DaemonExecutor(DaemonThreads, Executor):
    """One daemon thread for ``loop.run_in_executor``, for example of ``aiofiles``, and for callers
    without a loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a blocking function as soon as the thread is free. Any thread may call."""
        done: Future[T] = Future()
        self._queue.put(partial(_settle, done, partial(fn, *args, **kwargs)))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the queued calls. With ``wait``, blocks until they have ended."""
        if wait:
            self.stop()
        else:
            self._queue.put(None)


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
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # what the function returned

    post = from_threads(settle)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # the caller handles it
            failure = error
        post(result, failure)

    return done, run


async def settled(future: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Return the result of ``future``. If the caller is cancelled, call ``on_cancel``, still wait
    for the end, and only then raise ``CancelledError``. A loop that ends cancels ``future``, too,
    if that is a task; the task must then wait in the same way for threads that it uses."""
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


def from_threads(function: Callable[P, object]) -> Callable[P, None]:
    """Wrap ``function``, which must run on the current loop, so that other threads can call it. A
    call is dropped if the loop has been closed."""
    loop = asyncio.get_running_loop()

    def post(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            loop.call_soon_threadsafe(partial(function, *args, **kwargs))
        except RuntimeError:
            # The loop was closed while a tier was open, so nothing waits for this call.
            return

    return post


class Call:
    """One public call and the outcomes of its records. ``done`` is set after ``begun`` when every
    expected record has an outcome."""

    __slots__ = ("_left", "done", "outcomes")

    def __init__(self, outcome: object, records: int) -> None:
        """``outcome`` is the initial outcome of each record."""
        self.outcomes: list[Any] = [outcome] * records
        self._left = 1  # for begun()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def expect(self, waiters: Waiters, position: int) -> None:
        """Wait for one more record, whose outcome goes to this position."""
        self._left += 1
        waiters.append((self, position))

    def expect_answers(self, records: int) -> None:
        """Wait for this number of further records, whose outcomes come through ``answer`` and
        ``answered``."""
        self._left += records

    def answer(self, position: int, outcome: object) -> None:
        """Set the outcome of one record."""
        self.outcomes[position] = outcome

    def answered(self, records: int = 1) -> None:
        """Count records that have their outcome."""
        self._left -= records
        if not self._left:
            self.done.set_result(None)

    begun = answered
    """Declare that no more records will be expected."""

    @staticmethod
    def settle(waiters: Waiters, outcome: object) -> None:
        """Pass the outcome of a finished record to all calls that wait for it."""
        for call, position in waiters:
            call.outcomes[position] = outcome
            call.answered()
        waiters.clear()


class IoJob(Protocol):
    """Work for an I/O thread."""

    def run(self, scratch: Scratch) -> None:
        """Do the work. Blocks; must not raise."""

    def notify(self) -> None:
        """Report the result; called when the job counts as finished. Must not raise."""


class CountedJob(Protocol):
    """A job of a ``JobGroup``, with the number of its records."""

    @property
    def records(self) -> int: ...


J = TypeVar("J", bound=CountedJob)


class JobGroup(Generic[J]):
    """Jobs of one call, which report together: each message to the event loop wakes the loop's
    thread, which costs more than a small job.

    They report when the jobs that have ended since the last report have at least as many records as
    the remaining jobs, and at least ``REPORTED_MIN``. So the loop handles most records of a long
    call while the device still works.
    """

    def __init__(self, post: Callable[[JobGroup[J]], None], call: Call, records: int) -> None:
        """``records`` is the total number of records. Any thread may call ``post``."""
        self.call = call
        self._post = post
        self._left = records
        self._unreported = 0
        self._ended: list[J] = []
        self._lock = threading.Lock()

    def end(self, job: J) -> None:
        """Count a finished job. Any thread may call."""
        with self._lock:
            self._ended.append(job)
            self._left -= job.records
            self._unreported += job.records
            is_due = self._unreported >= max(REPORTED_MIN, self._left) or not self._left
            if is_due:
                self._unreported = 0
        if is_due:
            self._post(self)

    def take(self) -> list[J]:
        """Return the jobs that have ended, each of them once. This breaks a cycle of references,
        so that the views of the slab that the jobs hold are freed at once and not by garbage
        collection."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended


class IoThreads:
    """``count`` threads that run I/O jobs from one queue; their number is the queue depth that the
    device sees. One thread may call ``submit``; any may call ``busy`` (a hint)."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: queue.SimpleQueue[IoJob | None] = queue.SimpleQueue()
        self._submitted = 0
        self._finished = [0] * count
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"{name}-{n}", daemon=True)
            for n in range(count)
        ]
        start_all(self._threads, self.stop)

    def submit(self, job: IoJob) -> None:
        """Queue a job; the caller limits how many."""
        self._submitted += 1
        self._queue.put(job)

    def busy(self) -> bool:
        """Return True if a job is queued or running."""
        return self._submitted > sum(self._finished)

    def _run(self, number: int) -> None:
        scratch = Scratch()
        while (job := self._queue.get()) is not None:
            job.run(scratch)
            self._finished[number] += 1
            job.notify()
            del job

    def stop(self) -> None:
        """Finish the queued jobs and end the threads. Blocks as long as a thread hangs."""
        stop_all(self._threads, self._queue)

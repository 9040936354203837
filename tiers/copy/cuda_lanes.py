"""Streams, events and the two threads behind each lane of the CUDA copy engine.

A lane has its own stream, a thread that submits to it and a thread that waits for it, so that the
next job is submitted while the previous one is still being copied.

Ownership: one thread calls ``submit``. Jobs move through a queue to the submitting thread and from
there, with the event that marks their end, through another queue to the waiting thread. Event
handles are pooled in a deque, whose ``append`` and ``pop`` are atomic.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tiers.copy.base import EventTicket, Failures, FutureTicket, Ticket, TransferError
from tiers.cuda_driver import Driver, DriverError

CopyJob: TypeAlias = Callable[[int, list[object]], None]
"""``job(stream, kept)`` submits copies to ``stream``. It appends everything that the GPU reads for
them to ``kept`` before the submission that uses it. The lane keeps that list until the stream has
run everything, even if a later part of the job fails. Raises ``TransferError`` or
``DriverError``."""


class CudaEvent:
    """A recorded event. Its handle returns to the pool when the event is no longer referenced: a
    stream that already waits for the event does not need the handle."""

    __slots__ = ("_give_back", "handle")

    def __init__(self, handle: int, give_back: Callable[[int], None]) -> None:
        self.handle = handle
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self.handle)


class EventPool:
    """Records events, reusing handles. Callable from any thread with the right context."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: deque[int] = deque()

    def take(self) -> CudaEvent:
        """Return an event that is not recorded yet."""
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._driver.create_event()
        return CudaEvent(handle, self._free.append)

    def record(self, stream: int) -> CudaEvent:
        """Record an event at the current end of ``stream``."""
        event = self.take()
        self._driver.record_event(event.handle, stream)
        return event

    def close(self) -> None:
        """Free the unused handles."""
        while self._free:
            self._driver.destroy_event(self._free.pop())


class CudaTicket(EventTicket):
    """A ticket that drops its reference to the event at the end."""

    __slots__ = ()

    def finish(self, error: TransferError | None) -> None:
        super().finish(error)
        self._submitted = Future()  # no thread needs the event any more: its handle is reused


@dataclass(frozen=True, slots=True)
class _Flight:
    """A submitted job. If no ``end`` could be recorded, the job counts as ended when the stream has
    run everything."""

    ticket: FutureTicket
    end: CudaEvent | None
    error: TransferError | None
    kept: list[object]


class CudaLane:
    """Runs jobs on one stream in submission order.

    If a job fails while it submits, its ticket fails only when the stream has run everything that
    was submitted. So a finished ticket always means that no copy reads or writes any more.

    Raises ``DriverError`` when its stream, or the context of its threads, is not available.
    """

    def __init__(
        self, name: str, driver: Driver, context: int, events: EventPool, failures: Failures
    ) -> None:
        self._driver = driver
        self._context = context
        self._events = events
        self._failures = failures
        self._jobs: queue.SimpleQueue[tuple[CopyJob, CudaEvent | None, CudaTicket] | None] = (
            queue.SimpleQueue()
        )
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._entered: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        with driver.within(context):
            self._stream = driver.create_stream()
        try:
            self._start(f"kvtiers-{name}", self._submit_all)
            self._start(f"kvtiers-{name}-wait", self._wait_all)
        except BaseException:  # whatever failed, the first thread ends
            self.close()
            raise

    @property
    def stream(self) -> int:
        """The lane's stream; submit to it only before the first job."""
        return self._stream

    def submit(self, job: CopyJob, after: CudaEvent | None) -> Ticket:
        """Queue a job that runs after ``after``; the ticket completes when it has been copied."""
        ticket = CudaTicket()
        if self._closed:
            ticket.finish(TransferError("the copy engine is closed"))
        else:
            self._jobs.put((job, after, ticket))
        return ticket

    def close(self) -> None:
        """Run everything, then end the threads and free the stream. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # The first thread ends before the second. Threads may never have started.
        for number, thread in enumerate(self._threads):
            (self._flights if number else self._jobs).put(None)
            thread.join()
        with self._driver.within(self._context):
            with contextlib.suppress(DriverError):  # each job reports its errors
                self._driver.synchronize_stream(self._stream)
            self._driver.destroy_stream(self._stream)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread and wait until it has entered the context: a lane whose threads cannot
        call the driver could neither copy nor detect the end of a copy."""
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        if (error := self._entered.get()) is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._driver.enter_thread(self._context)
        except Exception as error:  # any error: the thread that started this one raises it
            self._entered.put(error)
            return
        self._entered.put(None)
        work()

    def _submit_all(self) -> None:
        """The submitting thread."""
        while (item := self._jobs.get()) is not None:
            job, after, ticket = item
            flight = self._submit_one(job, after, ticket)
            if flight.end is not None:
                ticket.ends_at(flight.end)
            self._flights.put(flight)
            del item, job, after, ticket, flight

    def _submit_one(self, job: CopyJob, after: CudaEvent | None, ticket: CudaTicket) -> _Flight:
        kept: list[object] = []
        ends: list[CudaEvent] = []

        def run() -> None:
            # Take the event before any copy begins: each copy needs one that marks its end.
            ends.append(self._events.take())
            if after is not None:
                self._driver.stream_wait_event(self._stream, after.handle)
            job(self._stream, kept)

        def mark() -> None:
            for end in ends:
                self._driver.record_event(end.handle, self._stream)

        error = self._failures.run(run)
        # Record the event even after a failure, because part of the job may be in progress.
        unmarked = self._failures.run(mark)
        end = ends[0] if ends and unmarked is None else None
        return _Flight(ticket, end, error or unmarked, kept)

    def _wait_all(self) -> None:
        """The waiting thread."""
        while (flight := self._flights.get()) is not None:
            unfinished = self._wait_one(flight)
            flight.ticket.finish(flight.error or unfinished)
            del flight

    def _wait_one(self, flight: _Flight) -> TransferError | None:
        """Wait until no part of this job runs any more."""
        unfinished = None
        if flight.end is not None:
            wait = partial(self._driver.synchronize_event, flight.end.handle)
            unfinished = self._failures.run(wait)
            if unfinished is None:
                return None
        # There is no event: wait for the stream, though it may have later jobs by now.
        stuck = self._failures.run(partial(self._driver.synchronize_stream, self._stream))
        return unfinished or stuck

"""Streams, events and the two threads behind each lane of the CUDA copy engine.

A lane is a stream of its own, a thread that submits to it and a thread that waits for it, so
that the next job is submitted while the previous one is still being copied.

Ownership: ``submit`` is called by one thread; jobs cross to the submitting thread by a queue and
from there, with the event that marks their end, to the waiting thread by another. Handles of
events are pooled in a deque, whose ``append`` and ``pop`` are atomic.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tiers.copy import Ticket, TransferError
from tiers.cuda_driver import Driver
from tiers.lanes import FutureTicket, run_work

Job: TypeAlias = Callable[[int], object]
"""Submits copies to the stream that it is given, without waiting for them. What it returns is
kept until they have ended. Raises ``TransferError`` or ``DriverError``."""


class CudaEvent:
    """A recorded event. Its handle goes back to the pool when nobody holds it any more: a stream
    that was told to wait for it does not need it again."""

    __slots__ = ("_pool", "handle")

    def __init__(self, handle: int, pool: deque[int]) -> None:
        self.handle = handle
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.handle)


class EventPool:
    """Records events, reusing handles. Callable from any thread with the right context."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: deque[int] = deque()

    def record(self, stream: int) -> CudaEvent:
        """An event at the present end of ``stream``."""
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._driver.create_event()
        event = CudaEvent(handle, self._free)
        self._driver.record_event(handle, stream)
        return event

    def close(self) -> None:
        """Free the handles that nobody holds."""
        while self._free:
            self._driver.destroy_event(self._free.pop())


@dataclass(frozen=True, slots=True)
class _Flight:
    """A submitted job. ``end`` is absent if not even that could be recorded."""

    ticket: FutureTicket
    end: CudaEvent | None
    error: TransferError | None
    kept: object


class CudaLane:
    """Runs jobs on one stream in submission order.

    A job that fails to submit fails its ticket only when the stream has run everything that it
    did submit, so a finished ticket always means that nobody writes any more.
    """

    def __init__(self, name: str, driver: Driver, context: int, events: EventPool) -> None:
        self._driver = driver
        self._context = context
        self._events = events
        with driver.within(context):
            self._stream = driver.create_stream()
        self._jobs: queue.SimpleQueue[tuple[Job, CudaEvent | None, FutureTicket] | None] = (
            queue.SimpleQueue()
        )
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._submit_all, name=f"kvtiers-{name}", daemon=True),
            threading.Thread(target=self._wait_all, name=f"kvtiers-{name}-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, after: CudaEvent | None) -> Ticket:
        """Queue a job that runs after ``after``; the ticket completes when it has been copied."""
        ticket = FutureTicket()
        if self._closed:
            ticket.finish(TransferError("the copy engine is closed"))
        else:
            self._jobs.put((job, after, ticket))
        return ticket

    def close(self) -> None:
        """Run what is queued, then end the threads and free the stream. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        with self._driver.within(self._context):
            self._driver.destroy_stream(self._stream)

    def _submit_all(self) -> None:
        """The submitting thread."""
        refused = run_work(partial(self._driver.enter_thread, self._context))
        while (item := self._jobs.get()) is not None:
            job, after, ticket = item
            self._flights.put(self._submit_one(job, after, ticket, refused))
            del item, job, after, ticket
        self._flights.put(None)

    def _submit_one(
        self, job: Job, after: CudaEvent | None, ticket: FutureTicket, refused: TransferError | None
    ) -> _Flight:
        if refused is not None:
            return _Flight(ticket, None, refused, None)
        kept: list[object] = []
        ends: list[CudaEvent] = []

        def run() -> None:
            if after is not None:
                self._driver.stream_wait_event(self._stream, after.handle)
            kept.append(job(self._stream))

        def mark() -> None:
            ends.append(self._events.record(self._stream))

        error = run_work(run)
        # Also after a failure: part of the job may be under way.
        unmarked = run_work(mark)
        return _Flight(ticket, ends[0] if ends else None, error or unmarked, kept)

    def _wait_all(self) -> None:
        """The waiting thread."""
        refused = run_work(partial(self._driver.enter_thread, self._context))
        while (flight := self._flights.get()) is not None:
            unfinished = None
            if flight.end is not None:
                unfinished = run_work(partial(self._driver.synchronize_event, flight.end.handle))
            flight.ticket.finish(flight.error or refused or unfinished)
            del flight

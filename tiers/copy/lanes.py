"""The two lanes of a copy engine that works with threads, and their tickets.

Ownership: the submitting thread writes a lane's queue and the lane's one worker thread reads it.
The worker completes a ticket's future; any loop may await it. Nothing else is shared, so no lock is
needed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tiers.copy.base import Ticket, TransferError
from tiers.copy.failures import Failures, Work
from tiers.io.awaiting import from_threads


class FutureTicket(Ticket):
    """A ticket that a worker thread completes with ``finish``."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        # A running future cannot be cancelled, so an abandoned wait does not affect the copy.
        self._future.set_running_or_notify_cancel()

    def done(self) -> bool:
        return self._future.done()

    async def completed(self) -> None:
        await asyncio.wrap_future(self._future)

    def on_done(self, call: Callable[[TransferError | None], object]) -> None:
        post = from_threads(call)

        def notify(future: Future[None]) -> None:
            error = future.exception()
            post(error if isinstance(error, TransferError) else None)

        self._future.add_done_callback(notify)

    def finish(self, error: TransferError | None) -> None:
        """End the ticket, once, from the worker thread."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


class EventTicket(FutureTicket):
    """A ticket of copies that end with an event, so that the model's stream can wait for them."""

    __slots__ = ("_submitted",)

    def __init__(self) -> None:
        super().__init__()
        self._submitted: Future[object] = Future()

    @property
    def submitted(self) -> Future[object] | None:
        return self._submitted

    def ends_at(self, event: object) -> None:
        """Note that everything of this copy precedes ``event`` on its stream."""
        self._submitted.set_result(event)


class Lane:
    """Runs submitted work on one thread, in order.

    Work that raises fails its ticket with ``TransferError``, and the lane continues. After
    ``close`` every submission fails at once.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, FutureTicket] | None] = queue.SimpleQueue()
        self._closed = False
        self._failures = Failures()
        self._thread = threading.Thread(target=self._run, name=f"kvtiers-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Ticket:
        """Queue ``work``; the ticket completes when it has run."""
        ticket = FutureTicket()
        if self._closed:
            ticket.finish(TransferError("the copy engine is closed"))
        else:
            self._queue.put((work, ticket))
        return ticket

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            ticket.finish(self._failures.run(work))

"""The thread of a process that commits to a shared index, and the client of its queue on the event
loop.

Requests queue up while a commit runs, and the next transaction carries out all of them, so the
number of flushes adapts to the speed of the disk. LMDB lets one process write at a time: only this
thread waits for the other processes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import lmdb

from tiers.io.threads import from_threads
from tiers.lmdb.shared.index import SharedIndex
from tiers.lmdb.shared.transaction import WriteTransaction, changing

T = TypeVar("T")


class CommitClient:
    """The event loop's side of the queue. Belongs to the loop on which it was made; any thread may
    call ``post`` and ``submit_then``."""

    def __init__(self, thread: SharedCommitThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._call = from_threads(_call)

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call ``function`` on the loop. Does nothing if the loop is closed."""
        self._call(function, *arguments)

    def submit(self, change: Callable[[WriteTransaction], T]) -> asyncio.Future[T | None]:
        """Make the change in a transaction and return its result; ``None`` if it failed."""
        done: asyncio.Future[T | None] = self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not done.done():
                done.set_result(result if error is None else None)

        self._thread.submit(CommitRequest(change, lambda *found: self.post(settle, *found)))
        return done

    def submit_then(
        self,
        change: Callable[[WriteTransaction], object],
        call: Callable[[bool], object] | None = None,
        *,
        flushes: bool = False,
    ) -> None:
        """Make the change, then run ``call`` on the loop with True if it succeeded."""

        def end(_result: object, error: Exception | None) -> None:
            if call is not None:
                self.post(call, error is None)

        self._thread.submit(CommitRequest(change, end, flushes))


def _call(function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


FLUSH_GATHER_S = 0.002
"""A transaction that flushes payloads waits this long for more changes."""
CHANGES_PER_COMMIT_MAX = 64


@dataclass(slots=True, eq=False)
class CommitRequest:
    """A change to make in a transaction. With ``flushes``, payloads are made durable first. The
    commit thread calls ``post`` with the result of ``change`` or the exception."""

    change: Callable[[WriteTransaction], Any]
    post: Callable[[Any, Exception | None], None]
    flushes: bool = False
    result: Any = None
    error: Exception | None = None


class SharedCommitThread:
    """The commit thread. ``failure`` is the reason why the index can no longer be written, or
    ``None``. It is never cleared."""

    def __init__(self, index: SharedIndex, number: int, flush: Callable[[], None]) -> None:
        """``flush`` makes payloads durable. Raises ``OSError``."""
        self._index = index
        self._number = number
        self._flush = flush
        self._requests: queue.SimpleQueue[CommitRequest | None] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.commits = self.sync_failures = 0
        self._thread = threading.Thread(target=self._run, name="tier-commit", daemon=True)
        self._thread.start()

    def submit(self, request: CommitRequest) -> None:
        """Queue a change. Any thread may call."""
        self._requests.put(request)

    def stop(self) -> None:
        """Carry out the queued changes and end the thread. Blocks until it has ended."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            batch, is_stopping = self._collect()
            if batch:
                self._carry_out(batch)
            for request in batch:
                request.post(request.result, request.error)

    def _collect(self) -> tuple[list[CommitRequest], bool]:
        """Return the changes of the next transaction, and True if the thread must end after
        them."""
        batch: list[CommitRequest] = []
        deadline = 0.0
        while len(batch) < CHANGES_PER_COMMIT_MAX:
            try:
                wait_s = max(0.0, deadline - time.monotonic()) if batch else None
                request = self._requests.get(timeout=wait_s)
            except queue.Empty:
                break
            if request is None:
                return batch, True
            if not batch:
                deadline = time.monotonic() + FLUSH_GATHER_S * request.flushes
            batch.append(request)
        return batch, False

    def _carry_out(self, batch: list[CommitRequest]) -> None:
        if any(request.flushes for request in batch):
            try:
                self._flush()
            except OSError as error:
                self.sync_failures += 1
                for request in batch:
                    request.error = error if request.flushes else None
        self._change([request for request in batch if request.error is None])

    def _change(self, batch: list[CommitRequest]) -> None:
        """Make all changes in one transaction, or each in a separate one if the index has no space
        for that."""
        if self.failure is not None or not batch:
            for request in batch:
                request.error = self.failure
            return
        try:
            with changing(self._index, self._number) as changes:
                for request in batch:
                    request.result = request.change(changes)
            self.commits += 1
        except lmdb.MapFullError as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for request in batch:
                self._change([request])
        except Exception as error:
            # Whatever LMDB raises, the state on disk is unknown and its environment may be
            # dead (MDB_PANIC): nothing more is written until the tier is opened again.
            self.failure = error
            for request in batch:
                request.error = error

"""The one thread of a process that writes to a shared index.

What is asked for queues up while a commit runs; the next transaction does all of it, so that the
number of flushes follows the speed of the disk. LMDB lets one process at a time write: the others'
threads wait here, and nobody else does.

Asking the thread that writes to a shared index for transactions, from the event loop.
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

from tiers.lmdb.shared.index import SharedIndex
from tiers.lmdb.shared.transaction import WriteTransaction, changing

T = TypeVar("T")


class Asking:
    """Belongs to the loop it was made on; ``post`` and ``ask_then`` may be called anywhere."""

    def __init__(self, commits: SharedCommits) -> None:
        self.commits = commits
        self._loop = asyncio.get_running_loop()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Have ``function`` called on the loop. Lost if the loop is gone."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop was closed over an open tier: nobody is left to tell.
            return

    def ask(self, change: Callable[[WriteTransaction], T]) -> asyncio.Future[T | None]:
        """Have it done in a transaction; ``None`` if it could not be."""
        done: asyncio.Future[T | None] = self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not done.done():
                done.set_result(result if error is None else None)

        self.commits.submit(Ask(change, lambda *found: self.post(settle, *found)))
        return done

    def ask_then(
        self,
        change: Callable[[WriteTransaction], object],
        call: Callable[[bool], object] | None = None,
        *,
        flushes: bool = False,
    ) -> None:
        """Have it done, and ``call`` called on the loop then, with whether it was."""

        def end(_result: object, error: Exception | None) -> None:
            if call is not None:
                self.post(call, error is None)

        self.commits.submit(Ask(change, end, flushes))


GATHER_S = 0.002
"""How long a transaction waits for more to do when it is not asked for alone."""
ASKED_MAX = 64


@dataclass(slots=True, eq=False)
class Ask:
    """Something to do in a transaction. ``flushes``: payloads must be durable before. ``post``
    gets what ``change`` returned, or why it could not be done; from this thread."""

    change: Callable[[WriteTransaction], Any]
    post: Callable[[Any, Exception | None], None]
    flushes: bool = False
    result: Any = None
    error: Exception | None = None


class SharedCommits:
    """``failure`` is why the index cannot be written any more, if so; once set it stays."""

    def __init__(self, index: SharedIndex, number: int, flush: Callable[[], None]) -> None:
        """``flush`` makes payloads durable. Raises ``OSError``."""
        self._index = index
        self._number = number
        self._flush = flush
        self._asked: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.commits = self.sync_failures = 0
        self._thread = threading.Thread(target=self._run, name="tier-commit", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask) -> None:
        """Queue it; from any thread."""
        self._asked.put(ask)

    def stop(self) -> None:
        """Do what is queued and end. Blocks, for as long as the thread hangs."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            batch, is_stopping = self._collect()
            if batch:
                self._do(batch)
            for ask in batch:
                ask.post(ask.result, ask.error)

    def _collect(self) -> tuple[list[Ask], bool]:
        """What is to be done together, and whether nothing comes after it."""
        batch: list[Ask] = []
        deadline = 0.0
        while len(batch) < ASKED_MAX:
            try:
                wait_s = deadline - time.monotonic()
                ask = self._asked.get(timeout=max(0.0, wait_s)) if batch else self._asked.get()
            except queue.Empty:
                break
            if ask is None:
                return batch, True
            if not batch:
                deadline = time.monotonic() + GATHER_S * ask.flushes
            batch.append(ask)
        return batch, False

    def _do(self, batch: list[Ask]) -> None:
        if any(ask.flushes for ask in batch):
            try:
                self._flush()
            except OSError as error:
                self.sync_failures += 1
                for ask in batch:
                    ask.error = error if ask.flushes else None
        self._change([ask for ask in batch if ask.error is None])

    def _change(self, batch: list[Ask]) -> None:
        """Everything in one transaction; where the index has no room for that, one each."""
        if self.failure is not None or not batch:
            for ask in batch:
                ask.error = self.failure
            return
        try:
            with changing(self._index, self._number) as changes:
                for ask in batch:
                    ask.result = ask.change(changes)
            self.commits += 1
        except lmdb.MapFullError as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for ask in batch:
                self._change([ask])
        except Exception as error:
            # Whatever LMDB raises, the state on disk is unknown and its environment may be
            # dead (MDB_PANIC): nothing more is written until the tier is opened again.
            self.failure = error
            for ask in batch:
                ask.error = error

"""Asking the thread that writes to a shared index for transactions, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tiers.shared_changes import Changes
from tiers.shared_commits import Ask, SharedCommits

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

    def ask(self, change: Callable[[Changes], T]) -> asyncio.Future[T | None]:
        """Have it done in a transaction; ``None`` if it could not be."""
        done: asyncio.Future[T | None] = self._loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not done.done():
                done.set_result(result if error is None else None)

        self.commits.submit(Ask(change, lambda *found: self.post(settle, *found)))
        return done

    def ask_then(
        self,
        change: Callable[[Changes], object],
        call: Callable[[bool], object] | None = None,
        *,
        flushes: bool = False,
    ) -> None:
        """Have it done, and ``call`` called on the loop then, with whether it was."""

        def end(_result: object, error: Exception | None) -> None:
            if call is not None:
                self.post(call, error is None)

        self.commits.submit(Ask(change, end, flushes))

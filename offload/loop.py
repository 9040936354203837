"""An asyncio loop in a separate thread, for drivers that do not use asyncio themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

END_S = 0.2
"""Maximum time for tasks to end when the loop stops."""


class EventLoopThread:
    """Starts a daemon thread that runs a loop until ``stop``."""

    def __init__(self, name: str = "kvtiers-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._end_tasks()
        finally:
            self.loop.close()

    def _end_tasks(self) -> None:
        """Cancel the remaining tasks, so that they release their resources, and wait briefly for
        that."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for its result; raises ``TimeoutError``."""
        future = self.start(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Stop the loop; returns whether the thread has ended in time."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

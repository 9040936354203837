"""What ended jobs leave to be done, a bounded number of chunks per step.

Part of the planner, on the same thread. Several jobs of thousands of chunks may end between two
steps; the states of their chunks then change over several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Backlog:
    """Pieces of work in order; one step does as many as have ``step_chunks``, but always one."""

    def __init__(self, step_chunks: int) -> None:
        self._pieces: deque[tuple[int, Callable[[], None]]] = deque()
        self._step_chunks = self._room = step_chunks

    def __len__(self) -> int:
        """Pieces that are left."""
        return len(self._pieces)

    def add(self, chunks: int, work: Callable[[], None]) -> None:
        """One more piece, about so many chunks."""
        self._pieces.append((chunks, work))

    def work(self) -> list[Exception]:
        """Do what this step may still do; what went wrong with single pieces."""
        errors: list[Exception] = []
        while self._pieces and self._room > 0:
            chunks, work = self._pieces.popleft()
            self._room -= max(1, chunks)
            try:
                work()
            except Exception as error:  # one bad piece must not lose the others
                errors.append(error)
        return errors

    def end_step(self) -> list[Exception]:
        """``work``, for the last time in this step."""
        errors = self.work()
        self._room = self._step_chunks
        return errors

"""What ended jobs leave to be done, a bounded number of chunks per step.

Part of the planner, on the same thread. Several jobs of thousands of chunks may end between two
steps; the states of their chunks then change over several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from offload.budget import StepBudget

AT_FIRST_LEAVES = 5
"""Eighths of the budget that are left to what the step has to do besides."""
LEAST_SHARE = 16
"""This part of what is behind is done in any case, so that it does not pile up in steps whose
budget others have used up: until it is done, chunks keep their slots and cannot be hit."""


class Backlog:
    """Pieces of work in order; a step does as many as its budget allows, but always one, and a
    sixteenth of what was behind when it began."""

    def __init__(self, budget: StepBudget) -> None:
        self._pieces: deque[tuple[int, Callable[[], None]]] = deque()
        self._budget = budget
        self._has_worked = False
        self._behind = 0  # what all pieces cost
        self._least = 0  # of that, what has to be done in this step

    def __len__(self) -> int:
        """Pieces that are left."""
        return len(self._pieces)

    def add(self, cost: int, work: Callable[[], None]) -> None:
        """One more piece, and what it costs of the budget."""
        self._pieces.append((max(1, cost), work))
        self._behind += max(1, cost)

    def work(self, leave: int = AT_FIRST_LEAVES) -> list[Exception]:
        """Do what this step may still do; what went wrong with single pieces."""
        errors: list[Exception] = []
        while self._pieces and (
            self._budget.above(leave) > 0 or not self._has_worked or self._least > 0
        ):
            cost, work = self._pieces.popleft()
            self._behind -= cost
            self._least -= cost
            self._budget.spend(cost)
            self._has_worked = True
            try:
                work()
            except Exception as error:  # one bad piece must not lose the others
                errors.append(error)
        return errors

    def end_step(self, leave: int) -> list[Exception]:
        """``work``, for the last time in this step."""
        errors = self.work(leave)
        self._has_worked = False
        self._least = self._behind // LEAST_SHARE
        return errors

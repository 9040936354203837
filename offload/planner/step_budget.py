"""What ended jobs leave to be done, a bounded number of chunks per step.

Part of the planner, on the same thread. Several jobs of thousands of chunks may end between two
steps; the states of their chunks then change over several.

What one step of vLLM may cost here, as one budget that the parts of the planner draw from.

Part of the planner, on the same thread. What is done later comes first in line: taking in what has
ended may leave the least, storing more, and what comes after it more again. So when there is too
much of everything the rest of a chunk's way keeps up with its beginning, and it is stores that
wait: they are asked for again, and cost nothing if they are never made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

STORE = EVICT = TAKE_IN = 1
TOUCH = WRITE_THROUGH = WRITTEN_THROUGH = 2
"""What a chunk costs at each station, in units of about a microsecond with a million keys in the
lower tier (``python -m bench hooks``), whose dicts are not in any cache."""
LONG_S = 0.025
"""A step of twice this length may do twice as much, and so on, about a twentieth of its time: or a
load that takes a hundred steps would wait for them longer than its prompt takes to compute, and of
what long steps compute less would be stored."""
TIMES_MAX = 8
STEPS = 4
"""So many steps in turn were as long: a server that had nothing to do does not look like one whose
steps are long."""


class StepBudget:
    """``units`` per step, ``times`` as many in long ones, of which ``left`` are."""

    def __init__(self, units: int) -> None:
        self.units = self.left = units
        self.times = 1
        self._ends: deque[float] = deque(maxlen=STEPS + 1)

    def above(self, eighths: int) -> int:
        """What may be spent so that as many eighths of the budget are left for others."""
        return self.left - self.times * self.units * eighths // 8

    def spend(self, units: int) -> None:
        """So much was done, even if it was more than was left."""
        self.left -= units

    def end_step(self, now: float, *, half: bool = False) -> None:
        """The next step begins (monotonic seconds); ``half`` of it is spoken for."""
        self._ends.append(now)
        shortest = min((end - start for start, end in pairwise(self._ends)), default=0.0)
        if len(self._ends) <= STEPS:
            shortest = 0.0
        self.times = max(1, min(TIMES_MAX, int(shortest / LONG_S)))
        self.left = self.times * self.units // (2 if half else 1)


AT_FIRST_LEAVES = 5
"""Eighths of the budget that are left to what the step has to do besides."""
LEAST_SHARE = 16
"""This part of what is behind is done in any case, so that it does not pile up in steps whose
budget others have used up: until it is done, chunks keep their slots and cannot be hit."""


class DeferredWork:
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

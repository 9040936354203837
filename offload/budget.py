"""What one step of vLLM may cost here, as one budget that the parts of the planner draw from.

Part of the planner, on the same thread. What is done later comes first in line: taking in what has
ended may leave the least, storing more, and what comes after it more again. So when there is too
much of everything the rest of a chunk's way keeps up with its beginning, and it is stores that
wait: they are asked for again, and cost nothing if they are never made.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

STORE = EVICT = TAKE_IN = 1
TOUCH = DEMOTE = DEMOTED = 2
"""What a chunk costs at each station, in units of about a microsecond with a million keys in the
lower tier (``python -m bench hooks``), whose dicts are not in any cache."""
LONG_S = 0.025
"""A step of twice this length may do twice as much, and so on, about a twentieth of its time: or a
load that takes a hundred steps would wait for them longer than its prompt takes to compute, and of
what long steps compute less would be stored."""
TIMES_MOST = 8
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
        self.times = max(1, min(TIMES_MOST, int(shortest / LONG_S)))
        self.left = self.times * self.units // (2 if half else 1)

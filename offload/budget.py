"""What one step of vLLM may cost here, as one budget that the parts of the planner draw from.

Part of the planner, on the same thread. What is done later comes first in line: taking in what has
ended may leave the least, storing more, and what comes after it more again. So when there is too
much of everything the rest of a chunk's way keeps up with its beginning, and it is stores that
wait: they are asked for again, and cost nothing if they are never made.
"""

from __future__ import annotations

STORE = EVICT = TAKE_IN = 1
TOUCH = DEMOTE = DEMOTED = 2
"""What a chunk costs at each station, in units of about a microsecond with a million keys in the
lower tier (``python -m bench hooks``), whose dicts are not in any cache."""


class StepBudget:
    """``units`` per step, of which ``left`` are."""

    def __init__(self, units: int) -> None:
        self.units = self.left = units

    def above(self, eighths: int) -> int:
        """What may be spent so that as many eighths of the budget are left for others."""
        return self.left - self.units * eighths // 8

    def spend(self, units: int) -> None:
        """So much was done, even if it was more than was left."""
        self.left -= units

    def end_step(self, *, half: bool = False) -> None:
        """The next step begins; ``half`` of it is spoken for."""
        self.left = self.units // 2 if half else self.units

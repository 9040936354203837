"""A simulated clock for vLLM's real scheduler with our connector."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from offload.connector.scheduler import scheduler_side, store_progress
from offload.requests import lookup

TICK_S = 1e-4
TIMED = (scheduler_side, store_progress, lookup)
"""The modules whose decisions depend on the time: how much a long step may do, how long a request
waits for a shared tier, when a circuit breaker lets a probe through."""


class SteppingClock:
    """Replaces the module ``time``: each read advances the clock by one tick, however fast this
    machine is."""

    def __init__(self) -> None:
        began = time.monotonic()
        self._ticks = (began + tick * TICK_S for tick in itertools.count())

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return next(self._ticks)


def pass_time_by_steps(patch: pytest.MonkeyPatch) -> None:
    """Let the scheduler side's time pass by steps, so that a seed gives the same run on every
    machine. A clock that a test has already installed stays."""
    clock = SteppingClock()
    for module in TIMED:
        if module.time is time:
            patch.setattr(module, "time", clock)

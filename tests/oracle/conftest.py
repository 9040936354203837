"""A simulated clock for vLLM's real scheduler with our connector."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from offload.connector.scheduler import scheduler_side

TICK_S = 1e-4


class SteppingClock:
    """Replaces the module ``time`` where the scheduler side reads the time: each read advances the
    clock by one tick, however fast this machine is. So a seed gives the same run on every
    machine."""

    def __init__(self) -> None:
        began = time.monotonic()
        self._ticks = (began + tick * TICK_S for tick in itertools.count())

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return next(self._ticks)


@pytest.fixture(autouse=True)
def _time_passes_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_side, "time", SteppingClock())

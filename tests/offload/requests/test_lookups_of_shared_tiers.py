"""A request that waits for a shared tier continues eventually, whatever the step length and however
long replies are remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.index.chunk_batch import UNKNOWN
from offload.planner.presence import SharedLimits
from offload.requests import lookup
from offload.requests.lookup import Lookups
from offload.requests.request_state import LookupState
from tests.offload.planner.test_presence import KEYS, PlannerOverSharedTier

WANTED = KEYS[:4]


@pytest.mark.parametrize("remember_s", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("step_s", [0.01, 2.0, 7.0])
@pytest.mark.parametrize("answers_after", [2, 3, 10_000])
def test_a_request_does_not_query_forever(
    monkeypatch: pytest.MonkeyPatch, remember_s: float, step_s: float, answers_after: int
) -> None:
    """An engine that computes other requests meanwhile in steps of this length; replies come after
    this number of steps."""
    world = PlannerOverSharedTier(limits=SharedLimits(0.05, remember_s))
    monkeypatch.setattr(lookup, "time", SimpleNamespace(monotonic=lambda: world.now))
    layout = SimpleNamespace(groups=(), alignment_tokens=16, restores_whole_prompts=False)
    matcher: Any = SimpleNamespace(layout=layout, wanted=lambda keys, start, limit: WANTED)
    log: Any = None
    lookups = Lookups(matcher, world.planner, log)
    identity = SimpleNamespace(keys=[WANTED], origin=UNKNOWN)
    state: Any = SimpleNamespace(identity=identity, lookup=LookupState())
    request: Any = SimpleNamespace(num_tokens=65)
    asked: list[Any] = []
    for _ in range(20):
        if not lookups._query(state, request, 0):
            return
        asked.append(world.step())
        world.at(world.now + step_s)
        if len(asked) >= answers_after:
            world.answer(asked[-answers_after], WANTED)
        world.at(world.now + 0.001)  # forgotten before the next step
    pytest.fail("it waits forever")

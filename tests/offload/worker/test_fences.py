"""The time that a step waits for stores that still read the blocks it overwrites."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import offload.worker.fences
from offload.messages.plan import StoreJob
from offload.worker.fences import Fences


def test_all_stores_of_a_step_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them ends well, the later the more of them there are."""
    now, given = [100.0], list[float]()

    def slow(_future: Future[None], timeout: float) -> None:
        given.append(timeout)
        now[0] += 0.75

    clock: Any = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(offload.worker.fences, "time", clock)
    fences = Fences()
    fences.add([StoreJob(job, 0, [job], [job]) for job in range(1, 5)])
    monkeypatch.setattr(Future, "result", slow)
    assert fences.wait([1, 2, 3, 4], 2.0) == 0
    assert given == [2.0, 1.25, 0.5, 0.0]

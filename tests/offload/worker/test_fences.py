"""The wait of a step for stores that still read the blocks that it overwrites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import offload.worker.fences
from offload.messages.plan import StoreJob
from offload.worker.fences import Fences, Reading
from tests.patience import PATIENCE_S

EVENT = object()


def test_all_stores_of_a_step_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store succeeds; the more there are, the later the last one ends."""
    now, given, held = [100.0], list[float](), list[object]()

    def slow(_reading: Reading, timeout: float) -> object:
        given.append(timeout)
        now[0] += 0.75
        return EVENT

    clock: Any = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(offload.worker.fences, "time", clock)
    fences = Fences()
    fences.add([StoreJob(job, 0, [job], [job]) for job in range(1, 5)])
    monkeypatch.setattr(Reading, "end", slow)
    assert fences.wait([1, 2, 3, 4], 2.0, held.append) == 0
    assert given == [2.0, 1.25, 0.5, 0.0]
    assert held == [EVENT] * 4


def test_a_store_that_has_read_its_blocks_needs_no_order_on_the_gpu() -> None:
    fences, held = Fences(), list[object]()
    reading = fences.add([StoreJob(1, 0, [1], [1])])[1]
    reading.will_end_at(EVENT)
    reading.set_result(None)
    assert fences.wait([1], 0.0, held.append) == 0
    assert held == []


def test_if_the_gpu_cannot_wait_the_step_does(caplog: pytest.LogCaptureFixture) -> None:
    fences = Fences()
    reading = fences.add([StoreJob(1, 0, [1], [1])])[1]
    reading.will_end_at(EVENT)

    def refuse(_event: object) -> None:
        reading.set_result(None)  # the copy ends while the step waits
        raise RuntimeError("cuStreamWaitEvent: invalid handle")

    assert fences.wait([1], PATIENCE_S, refuse) == 0
    assert "cuStreamWaitEvent" in caplog.text


def test_a_store_that_was_never_submitted_is_poisoned_and_never_begins() -> None:
    fences = Fences()
    reading = fences.add([StoreJob(1, 0, [1], [1])])[1]
    assert fences.wait([1], 0.0, list[object]().append) == 1
    assert reading.cancelled()
    reading.will_end_at(EVENT)  # too late, but harmless

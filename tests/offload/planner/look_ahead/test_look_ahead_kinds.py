"""Tests of look-ahead alone: requests that cannot be read for now do not hide those behind them."""

from __future__ import annotations

from typing import Any

import pytest

from offload.index.request_options import RequestHints
from offload.index.retention import Evict
from offload.planner.look_ahead import look_ahead
from offload.planner.step_budget import AHEAD_OPEN_REQUESTS_MAX
from policies import hints
from tests.offload.planner.look_ahead.test_look_ahead import Queue, fill
from tests.offload.planner.look_ahead.test_look_ahead_tiers import slower_than_computing
from tests.offload.planner.simulated_ranks import key_of

LOW = RequestHints(stored={hints.PRIORITY: hints.LOW})
FILLED = range(200, 240)


def wait_at_low_priority(queue: Queue, count: int) -> None:
    """Let requests of low priority wait at the front of the queue."""
    for n in range(count):
        queue.wait(f"low{n}", range(10), 0, n, hints=LOW)


@pytest.mark.parametrize("count", [1, AHEAD_OPEN_REQUESTS_MAX + 1])
def test_requests_of_low_priority_do_not_stop_those_behind_them(count: int) -> None:
    queue = Queue()
    fill(queue, FILLED)
    wait_at_low_priority(queue, count)
    queue.wait("second", range(20, 25), 2)
    queue.wait("first", range(10, 20), 1)
    assert queue.step() == list(range(10, 25)), "in the order in which they will run"
    queue.wait("third", range(25, 30), 3)
    assert queue.step() == list(range(25, 30)), "in the next step, too"


def test_space_that_is_free_goes_to_the_head_of_the_queue_whatever_its_priority() -> None:
    queue = Queue()
    fill(queue, FILLED[:36])
    queue.wait("second", range(10, 15), 1)
    wait_at_low_priority(queue, 1)
    assert queue.step() == [*range(4), *range(10, 15)]
    queue.wait("third", range(20, 25), 2)
    queue.planner.cpu.drop([key_of(FILLED[0])])
    assert queue.step() == [4, *range(20, 25)]


def test_a_cpu_tier_that_can_evict_nothing_is_searched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each search examines every chunk that cannot be evicted."""
    queue = Queue()
    fill(queue, FILLED)
    queue.planner.cpu.pin(list(map(key_of, FILLED)))
    reserve, may_evict = queue.planner.cpu.reserve, []

    def count(keys: Any, infos: Any, evict: Evict, **options: Any) -> Any:
        may_evict.append(evict is not Evict.NOTHING)
        return reserve(keys, infos, evict, **options)

    monkeypatch.setattr(queue.planner.cpu, "reserve", count)
    wait_at_low_priority(queue, 3)
    for n in range(3):
        queue.wait(f"{n}", range(10 + 10 * n, 20 + 10 * n), 1, n)
    for _ in range(look_ahead.AHEAD_RETRY_STEPS + 1):
        assert queue.step() == []
    assert may_evict == [False, True]


def test_prompts_too_large_for_a_slow_tier_do_not_hide_smaller_ones() -> None:
    queue = Queue()
    slower_than_computing(queue)
    for n in range(AHEAD_OPEN_REQUESTS_MAX + 1):
        queue.wait(f"{n}", range(21), 1, n)
    queue.wait("small", range(30, 45), 2)
    assert queue.step() == list(range(30, 45))


def test_a_prompt_that_now_fits_is_read_from_a_slow_tier() -> None:
    queue = Queue()
    slower_than_computing(queue)
    queue.wait("one", range(21), 1)
    assert queue.step() == []
    queue.wait("one", range(15), 1)
    assert queue.step() == list(range(15))


def test_a_step_passes_over_a_limited_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "AHEAD_FLYING_MAX", 4)
    monkeypatch.setattr(look_ahead, "AHEAD_OPEN_REQUESTS_MAX", 3)
    queue = Queue(tiers=2)
    queue.disks[0].drop(list(map(key_of, range(30, 100))))
    for n in range(3):
        queue.wait(f"{n}", range(10 * n, 10 * n + 10), 1, n)
    assert queue.step() == list(range(4))
    queue.wait("other tier", range(30, 32), 2)
    assert queue.step() == []
    queue.ahead.leave("1")
    assert queue.step() == [30, 31]

"""Tests of look-ahead alone: which tiers it reads from, and what it does when they fail or hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.index.request_options import Controls
from offload.messages.plan import IN_SLAB
from offload.messages.report import Observed, StepReport
from offload.planner.circuit_breaker import BreakerState
from offload.planner.load_or_recompute import RETRY_S, SAMPLES_MIN
from offload.planner.look_ahead import look_ahead, wanted_soon
from tests.offload.planner.look_ahead.test_look_ahead import Queue, batch, fill
from tests.offload.planner.simulated_ranks import key_of


def test_a_tier_whose_reads_hang_takes_nothing_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request's chunks lie in the tier that hangs, and those behind it in another."""
    monkeypatch.setattr(look_ahead, "AHEAD_FLYING_MAX", 4)
    queue = Queue(tiers=2)
    queue.disks[0].drop([key_of(n) for n in range(10, 100)])
    queue.disks[1].drop([key_of(n) for n in range(10)])
    queue.wait("one", range(10), 1)
    queue.wait("two", range(10, 20), 2)
    assert queue.step() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert queue.step() == [], "both have as many reads in flight as they may have"
    queue.end(tiers=[1])
    assert queue.step() == [14, 15, 16, 17]
    queue.end(tiers=[1])
    assert queue.step() == [18, 19]
    queue.end(tiers=[0])
    assert queue.step() == [4, 5, 6, 7], "the tier must be read again once it answers"
    queue.end()
    assert queue.step() == [8, 9]


def test_a_request_behind_a_tier_that_hangs_is_read_from_another_once_the_breaker_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look_ahead, "AHEAD_FLYING_MAX", 4)
    queue = Queue(tiers=2)
    queue.wait("one", range(10), 1)
    assert queue.step() == [0, 1, 2, 3]
    assert {job.items[0].tier for job in queue.reading} == {0}
    queue.planner.complete(StepReport(tiers={(0, 0): Observed(reads_failed=3)}))
    assert queue.step() == [4, 5, 6, 7]
    assert queue.reading[-1].items[0].tier == 1


def test_only_tiers_that_the_request_may_read_are_read() -> None:
    queue = Queue(tiers=2)
    queue.disks[0].drop([key_of(n) for n in range(5)])
    queue.wait("one", range(10), 1, controls=Controls(read=frozenset({-1, 1})))
    queue.step()
    (job,) = queue.reading
    assert {item.tier for item in job.items} == {1}
    queue.wait("two", range(20, 30), 2, controls=Controls(read=frozenset({-1})))
    assert queue.step() == []


def test_a_tier_that_fails_is_not_read() -> None:
    queue = Queue()
    queue.planner.complete(StepReport(tiers={(0, 0): Observed(reads_failed=3)}))
    queue.wait("one", range(10), 1)
    assert queue.step() == []


def test_a_tier_that_fails_during_a_read_is_read_again_when_it_works() -> None:
    queue = Queue(share=0.25)
    queue.wait("one", range(20), 1)
    assert queue.step() == list(range(10))
    queue.planner.complete(StepReport(tiers={(0, 0): Observed(reads_failed=3)}))
    queue.end(*range(10))
    assert queue.held() == []
    assert queue.step() == []
    queue.planner.health[0].reads._enter(BreakerState.CLOSED)
    assert queue.step() == list(range(10, 20))


def test_what_two_tiers_hold_is_read_whole_once_there_is_space() -> None:
    """The CPU tier is full when a chunk of the first tier is reached; chunks of the second tier
    come before it."""
    queue = Queue(tiers=2)
    queue.disks[0].drop([key_of(n) for n in range(1, 10, 2)])
    queue.disks[1].drop([key_of(n) for n in range(0, 10, 2)])
    filled = range(200, 237)
    fill(queue, filled)
    queue.planner.cpu.pin([key_of(n) for n in filled])
    queue.wait("one", range(10), 1)
    read = queue.step()
    assert read == [0, 2, 4]
    queue.end()
    queue.planner.cpu.unpin([key_of(n) for n in filled])
    for _ in range(look_ahead.AHEAD_RETRY_STEPS + 1):
        read += queue.step()
    assert sorted(read) == list(range(10))


def test_a_tier_that_turns_slow_is_not_read_any_more() -> None:
    """Loads of chunks that were read ahead come from the CPU tier, so they do not reveal this."""
    queue = Queue()
    for _ in range(3):
        queue.planner.health.computed(10_000, 1.0)
    queue.wait("one", range(16), 1)
    queue.step()
    queue.end(failed=True, late=True, seconds=10.0)
    assert not queue.planner.health[0].break_even.pays
    queue.wait("two", range(20, 30), 2)
    assert queue.step() == []


def slower_than_computing(queue: Queue) -> None:
    """Let the planner measure that the lower tier is half as fast as computing."""
    for _ in range(SAMPLES_MIN):
        queue.planner.health.computed(1000, 1.0)
    for _ in range(SAMPLES_MIN):
        queue.planner.health[0].loaded(1000, 2.0, queue.now)
    assert not queue.planner.health[0].break_even.pays


def test_a_slow_tier_is_probed_while_nothing_is_read_ahead_from_it() -> None:
    """Beside reads ahead, a probe would measure only a part of the tier's speed, so a tier that is
    fast again would seem slow as long as requests wait."""
    queue = Queue(slots=80)
    slower_than_computing(queue)
    queue.wait("one", range(30), 1)
    assert queue.step() == list(range(30)), "it is read for a request that waits"
    queue.wait("two", range(30, 40), 2)
    began = len(queue.reading)
    assert queue.step(RETRY_S) == []
    assert len(queue.reading) == began, "neither a probe nor a read begins"
    queue.end()
    assert queue.step() == []
    [probe] = queue.reading
    assert not probe.is_ahead
    queue.end(seconds=1.0)
    assert queue.step() == list(range(30, 40))


@pytest.mark.parametrize("chunks", [20, 21])
def test_a_slow_tier_is_read_only_for_prompts_of_which_the_share_holds_all(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted_soon, "WANTED_CHUNKS_MAX", 5)
    queue = Queue(slots=40)
    slower_than_computing(queue)
    queue.wait("one", range(chunks), 1)
    assert queue.step() == (list(range(5)) if chunks == 20 else [])


def test_a_load_joins_reads_ahead_although_another_tier_is_unavailable() -> None:
    queue = Queue(tiers=2)
    queue.disks[1].drop([key_of(n) for n in range(100)])
    queue.planner.complete(StepReport(tiers={(1, 0): Observed(reads_failed=3)}))
    assert not queue.planner.health[1].readable
    queue.wait("one", range(3), 1)
    assert queue.step() == [0, 1, 2]
    queue.planner.loads.plan("one", [replace(batch(range(3)), blocks=range(3))])
    (load,) = [job for job in queue.planner.step().loads if not job.is_ahead]
    assert {item.tier for item in load.items} == {IN_SLAB}

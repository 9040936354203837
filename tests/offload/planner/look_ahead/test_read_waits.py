"""Tests of requests that wait for their reads: the decision, its limits, and how a wait ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from offload.index.request_options import Controls
from offload.layout.keys import CPU
from offload.messages.report import JobResult, Observed, StepReport
from offload.planner.load_or_recompute import SAMPLES_MIN, ShortenReason
from offload.planner.look_ahead import look_ahead, read_waits
from offload.planner.look_ahead.read_waits import (
    ALWAYS,
    AUTO,
    STUCK_ASKS,
    TOTAL_S,
    WORTH_S,
    Action,
    BlockDemand,
    ReadEstimate,
    decide,
)
from offload.planner.tier_health import HealthLimits, TierHealths
from tests.offload.planner.look_ahead.test_look_ahead import Queue, batch
from tests.offload.planner.simulated_ranks import key_of

LIMIT_S = 10.0
SCARCE, AMPLE = (
    BlockDemand(free=15, needed=10, waiting=1),
    BlockDemand(free=20, needed=10, waiting=1),
)

READING = ReadEstimate(
    is_read=False,
    is_stuck=False,
    waited_s=1.0,
    reading_s=1.0,
    limit_s=LIMIT_S,
    is_queued=False,
    read_s=2.0,
    compute_s=None,
    waiting=1,
    worth_s=WORTH_S,
    free_blocks=15,
    needed_blocks=10,
    others=1,
)


@pytest.mark.parametrize(
    ("change", "auto", "always"),
    [
        ({}, Action.WAIT, Action.WAIT),
        ({"is_read": True}, Action.BEGIN, Action.BEGIN),
        ({"is_stuck": True}, Action.BEGIN, Action.BEGIN),
        ({"waited_s": TOTAL_S}, Action.BEGIN, Action.BEGIN),
        ({"reading_s": LIMIT_S}, Action.LATE, Action.LATE),
        ({"read_s": None}, Action.BEGIN, Action.WAIT),
        ({"read_s": WORTH_S / 2}, Action.BEGIN, Action.WAIT),
        ({"free_blocks": 20}, Action.BEGIN, Action.WAIT),
        ({"free_blocks": 0, "others": 0}, Action.BEGIN, Action.WAIT),
        ({"free_blocks": 20, "is_queued": True}, Action.WAIT, Action.WAIT),
        ({"is_queued": True, "compute_s": 0.9}, Action.COMPUTE, Action.WAIT),
        ({"is_queued": True, "compute_s": 1.0}, Action.WAIT, Action.WAIT),
        ({"is_queued": True, "compute_s": 1.0, "free_blocks": 20}, Action.COMPUTE, Action.WAIT),
        ({"is_queued": True, "compute_s": 3.0, "free_blocks": 20}, Action.WAIT, Action.WAIT),
        ({"compute_s": 1.0}, Action.WAIT, Action.WAIT),
    ],
)
def test_the_choice(change: dict[str, Any], auto: Action, always: Action) -> None:
    estimate = dataclasses.replace(READING, **change)
    assert (decide(AUTO, estimate), decide(ALWAYS, estimate)) == (auto, always)


def test_only_answers_that_leave_something_out_have_a_reason() -> None:
    reasons = {answer: answer.shorten_reason for answer in Action}
    assert reasons == {
        Action.BEGIN: ShortenReason.NOTHING,
        Action.WAIT: ShortenReason.NOTHING,
        Action.COMPUTE: ShortenReason.QUEUE,
        Action.LATE: ShortenReason.LATE,
    }


class Waits(Queue):
    """Requests that vLLM could run, over a disk that reads ``speed`` tokens per second. vLLM
    computes 80."""

    def __init__(self, choice: str = AUTO, *, speed: float = 160.0, **options: Any) -> None:
        limits = HealthLimits(load_timeout_s=LIMIT_S)
        tiers = options.get("tiers", 1)
        health = TierHealths([f"disk{n}" for n in range(tiers)], limits)
        super().__init__(health=health, wait_for_reads=choice, **options)
        self.waits = self.planner.read_waits
        self.computing = 0
        for _ in range(SAMPLES_MIN if speed else 0):
            for tier in self.planner.health.tiers:
                tier.loaded(1600, 1600 / speed, 0.0)
            self.planner.health.computed(1600, 20.0)

    def decide(self, name: str, blocks: BlockDemand = SCARCE) -> Action:
        return self.waits.decide(name, self.now, blocks, lambda: self.computing)

    def begins(self, name: str, numbers: Iterable[int], *order: int) -> list[int]:
        """Let a request wait for these chunks; return those whose reads begin."""
        self.wait(name, numbers, *order)
        assert self.decide(name) is Action.WAIT
        return self.step()


def test_a_request_waits_until_its_reads_have_ended() -> None:
    waits = Waits()
    assert waits.begins("one", range(10), 1) == list(range(10))
    assert waits.decide("one") is Action.WAIT
    waits.end()
    assert waits.decide("one") is Action.BEGIN
    assert waits.decide("one") is Action.BEGIN, "vLLM had no blocks for it"
    assert waits.waits.waited_s("one") == pytest.approx(0.01)
    waits.waits.leave("one", waits.now)
    totals = waits.planner.totals()
    assert totals["read_waits"] == 1
    assert totals["read_wait_seconds"] == pytest.approx(0.01)
    assert not waits.waits._ended


def test_the_last_reads_are_not_waited_for() -> None:
    """The request does not wait for its last reads; its load does."""
    waits = Waits(slots=80)
    waits.wait("one", range(33), 1)
    assert waits.decide("one") is Action.WAIT
    waits.step()
    first, second, third = waits.reading
    waits.planner.complete(StepReport({job: JobResult() for job in (first.job, second.job)}))
    assert len(third.items) == 1
    assert waits.decide("one") is Action.BEGIN


def test_what_the_cpu_tier_holds_is_not_waited_for() -> None:
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.end()
    waits.ahead.leave("one", [batch(range(10))])
    waits.wait("two", range(10), 2)
    assert waits.decide("two") is Action.BEGIN
    assert waits.planner.totals()["read_waits"] == 1, "only the first"


def test_a_request_that_is_not_read_for_does_not_wait() -> None:
    assert Waits(ALWAYS).decide("unknown") is Action.BEGIN


def test_a_tier_that_was_not_measured_is_not_waited_for() -> None:
    """Requests do not wait for such a tier; otherwise no load would ever measure it."""
    waits = Waits(speed=0.0)
    waits.wait("one", range(10), 1)
    assert waits.decide("one") is Action.BEGIN


def test_reads_that_take_too_long_are_given_up() -> None:
    """The time counts from the beginning of the request's own reads. The request then begins with
    the chunks that have arrived."""
    waits = Waits(ALWAYS, share=0.25)
    waits.begins("one", range(10), 1)
    waits.wait("two", range(20, 30), 2)
    waits.now += LIMIT_S - 1
    assert waits.decide("one") is Action.WAIT
    assert waits.decide("two") is Action.WAIT
    waits.now += 1
    assert waits.decide("one") is Action.LATE
    waits.end()
    waits.ahead.leave("one", [batch(range(10))])
    waits.waits.leave("one", waits.now)
    waits.now += LIMIT_S
    assert waits.step() == list(range(20, 30))
    assert waits.decide("two") is Action.WAIT, "its reads have just begun"


def test_the_reading_time_before_a_wait_does_not_count() -> None:
    waits = Waits(ALWAYS)
    waits.wait("one", range(10), 1)
    waits.step()
    waits.now += 2 * LIMIT_S
    assert waits.decide("one") is Action.WAIT


def test_every_wait_ends() -> None:
    """Reads for another request continue without end."""
    waits = Waits(ALWAYS)
    waits.begins("urgent", range(60), 1)
    waits.wait("one", range(60, 70), 2)
    began = waits.now
    while (answer := waits.decide("one")) is Action.WAIT:
        waits.now += 1.0
        assert waits.now - began <= TOTAL_S
    assert answer is Action.BEGIN
    assert waits.now - began == TOTAL_S


def test_a_wait_ends_when_nothing_is_read() -> None:
    """Chunks of other requests, which do not run, fill the share."""
    waits = Waits(ALWAYS)
    waits.wait("other", range(20), 1)
    waits.step()
    waits.end()
    waits.wait("one", range(30, 40), 2)
    answers = []
    while not answers or answers[-1] is Action.WAIT:
        answers.append(waits.decide("one"))
        waits.step()
    assert answers == [Action.WAIT] * STUCK_ASKS + [Action.BEGIN]


def test_reads_that_end_within_a_step_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "AHEAD_FLYING_MAX", 8)
    waits = Waits(ALWAYS, slots=200)
    waits.wait("one", range(80), 1)
    for _ in range(10):
        assert waits.decide("one") is Action.WAIT
        assert len(waits.step()) == 8
        waits.end()
        assert not waits.ahead.is_reading
    assert waits.decide("one") is Action.BEGIN


def test_a_tier_that_fails_ends_the_waits() -> None:
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.planner.complete(StepReport(tiers={(0, 0): Observed(reads_failed=3)}))
    assert waits.decide("one") is Action.BEGIN
    waits.wait("two", range(20, 30), 2)
    assert waits.decide("two") is Action.BEGIN


def test_a_reset_ends_the_waits() -> None:
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.planner.forget_all()
    assert waits.decide("one") is Action.BEGIN


def test_a_request_that_ends_leaves_nothing() -> None:
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.now += 3.0
    waits.waits.leave("one", waits.now)
    assert not len(waits.waits)
    assert not waits.waits._ended
    assert waits.waits.seconds == pytest.approx(3.01)


def test_a_preempted_request_does_not_wait_again() -> None:
    waits = Waits(ALWAYS)
    waits.waits.exempt("one")
    waits.wait("one", range(10), 1)
    assert waits.decide("one") is Action.BEGIN


def test_few_requests_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_waits, "READ_WAIT_REQUESTS_MAX", 1)
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.wait("two", range(20, 30), 2)
    assert waits.decide("two") is Action.BEGIN


@pytest.mark.parametrize(("computing", "answer"), [(0, Action.COMPUTE), (64, Action.WAIT)])
def test_behind_other_reads_a_request_computes_if_that_is_sooner(
    computing: int, answer: Action
) -> None:
    """Both reads take 2.6 s. Computing the 160 tokens of the request takes 160 / (0.9 * 80) = 2.2
    s, and after 64 other tokens 3.1 s."""
    waits = Waits()
    waits.begins("one", range(16), 1)
    waits.wait("two", range(20, 30), 2)
    waits.computing = computing
    assert waits.decide("two", AMPLE) is answer


def test_loads_in_flight_delay_the_reads() -> None:
    """Without loads in flight, a short read is not worth a wait."""
    waits = Waits(speed=1600.0)
    waits.wait("one", range(1), 1)
    waits.wait("two", range(1, 2), 2)
    assert waits.decide("one") is Action.BEGIN
    waits.planner.health[0].break_even.reads.begin(1, 1600)
    assert waits.decide("two") is Action.WAIT


def test_only_tiers_that_the_request_may_read_are_waited_for() -> None:
    waits = Waits(ALWAYS)
    waits.wait("one", range(10), 1, controls=Controls(read=frozenset({CPU})))
    assert waits.decide("one") is Action.BEGIN


def test_reads_that_fail_end_the_wait() -> None:
    waits = Waits(ALWAYS)
    waits.begins("one", range(10), 1)
    waits.end(*range(10))
    assert waits.decide("one") is Action.BEGIN
    assert key_of(0) not in waits.planner.cpu.resident

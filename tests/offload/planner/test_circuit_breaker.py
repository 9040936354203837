"""A breaker compared with a naive model, and each of its rules by itself."""

from __future__ import annotations

import random

import pytest

from offload.planner.circuit_breaker import BreakerState, CircuitBreaker


def opened(breaker: CircuitBreaker, now: float = 0.0) -> CircuitBreaker:
    breaker.observe(0, 100, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_at_the_configured_number_of_failures_in_a_row() -> None:
    breaker = CircuitBreaker(failures=3)
    for failed in (1, 1):
        breaker.observe(0, failed, 0.0)
        assert breaker.closed
    breaker.observe(0, 1, 0.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.openings == 1


def test_one_success_resets_the_count() -> None:
    breaker = CircuitBreaker(failures=3)
    for _ in range(20):
        breaker.observe(0, 2, 0.0)
        breaker.observe(1, 0, 0.0)
    assert breaker.closed


def test_a_report_of_mostly_failures_counts_as_failures() -> None:
    breaker = CircuitBreaker(failures=3)
    breaker.observe(1, 3, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_one_failing_rank_is_not_outvoted_by_the_others() -> None:
    breaker = CircuitBreaker(failures=3)
    for _ in range(3):
        assert breaker.closed
        for rank in (0, 1, 3):
            breaker.observe(5, 0, 0.0, rank)
        breaker.observe(0, 1, 0.0, 2)
    assert breaker.state is BreakerState.OPEN


def test_a_probe_is_due_after_the_wait_and_not_before() -> None:
    breaker = opened(CircuitBreaker(wait_s=5.0), now=100.0)
    breaker.tick(104.9)
    assert breaker.state is BreakerState.OPEN
    breaker.tick(105.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_the_wait_doubles_up_to_its_bound_and_starts_again() -> None:
    breaker = opened(CircuitBreaker(wait_s=5.0, wait_max_s=30.0))
    now, waits = 0.0, []
    for _ in range(5):
        began = now
        while breaker.state is BreakerState.OPEN:
            now += 1.0
            breaker.tick(now)
        waits.append(now - began)
        breaker.judge(now, good=False)
    assert waits == [5.0, 10.0, 20.0, 30.0, 30.0]
    breaker.tick(now + 30.0)
    breaker.judge(now + 30.0, good=True)
    opened(breaker, now + 40.0)
    breaker.tick(now + 45.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_only_a_probe_of_all_ranks_closes_it() -> None:
    """One rank's first good batch says nothing about the others."""
    breaker = opened(CircuitBreaker(wait_s=1.0))
    breaker.tick(1.0)
    breaker.observe(10, 0, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.judge(1.0, good=True)
    assert breaker.closed


def test_an_operation_begun_before_it_opened_does_not_close_it() -> None:
    breaker = opened(CircuitBreaker())
    breaker.observe(10, 0, 1.0)
    breaker.judge(1.0, good=True)
    assert breaker.state is BreakerState.OPEN


def test_a_late_probe_opens_it_again() -> None:
    breaker = opened(CircuitBreaker(wait_s=1.0))
    breaker.tick(1.0)
    breaker.observe(0, 1, 1.0)
    breaker.judge(1.5, good=True)
    assert breaker.state is BreakerState.OPEN


def test_after_closing_it_takes_the_full_number_of_failures_again() -> None:
    breaker = CircuitBreaker(failures=3, wait_s=1.0)
    breaker.observe(0, 2, 0.0, rank=1)
    opened(breaker)
    breaker.tick(1.0)
    breaker.judge(1.0, good=True)
    breaker.observe(0, 2, 2.0, rank=1)
    assert breaker.closed


@pytest.mark.parametrize("seed", range(50))
def test_it_agrees_with_a_naive_model(seed: int) -> None:
    """The model is the list of everything that happened since the last change of state."""
    choose = random.Random(seed)
    breaker, limit, now = CircuitBreaker(failures=3, wait_s=2.0, wait_max_s=8.0), 3, 0.0
    rows: dict[int, list[bool]] = {}
    state, wait, until = BreakerState.CLOSED, 2.0, 0.0
    for _ in range(400):
        now += choose.random()
        act = choose.random()
        if act < 0.6:
            rank, good = choose.randrange(3), choose.random() < 0.4
            breaker.observe(int(good), int(not good), now, rank)
            if state is BreakerState.CLOSED:
                rows.setdefault(rank, []).append(good)
                if len(rows[rank]) >= limit and not any(rows[rank][-limit:]):
                    state, wait, until, rows = BreakerState.OPEN, 2.0, now + 2.0, {}
            elif state is BreakerState.HALF_OPEN and not good:
                wait = min(2 * wait, 8.0)
                state, until = BreakerState.OPEN, now + wait
        elif act < 0.9:
            breaker.tick(now)
            if state is BreakerState.OPEN and now >= until:
                state = BreakerState.HALF_OPEN
        else:
            good = choose.random() < 0.5
            breaker.judge(now, good=good)
            if state is BreakerState.HALF_OPEN:
                wait = wait if good else min(2 * wait, 8.0)
                state, until = (
                    (BreakerState.CLOSED, 0.0) if good else (BreakerState.OPEN, now + wait)
                )
        assert breaker.state is state, f"seed {seed}"

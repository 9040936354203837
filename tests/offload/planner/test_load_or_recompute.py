"""Break-even: what is measured, when loading stops and resumes, and that the decision is stable."""

from __future__ import annotations

import itertools

import pytest

from offload.planner.load_or_recompute import (
    AHEAD_SHARE,
    DEADLINE_SHARE,
    FORGET_S,
    RESUME_ABOVE,
    RETRY_MAX_S,
    RETRY_S,
    SAMPLES_KEPT,
    SAMPLES_MIN,
    STOP_BELOW,
    TOKENS_MIN,
    LoadOrRecompute,
    Rate,
    ShortenReason,
)

TOKENS = 1000


def prefill_of(rate: float) -> Rate:
    """Tokens per second, measured often enough."""
    prefill = Rate()
    for _ in range(SAMPLES_MIN):
        prefill.observe(TOKENS, TOKENS / rate)
    return prefill


def load_at(
    break_even: LoadOrRecompute, rate: float, now: float = 0.0, times: int = SAMPLES_MIN
) -> None:
    for _ in range(times):
        break_even.observe_load(TOKENS, TOKENS / rate, now)


def probe_at(break_even: LoadOrRecompute, rate: float, now: float) -> None:
    break_even.observe_probe(TOKENS, TOKENS / rate, now)


def test_a_rate_is_the_median_of_the_last_samples() -> None:
    rate = Rate()
    for value in (1000.0, 9000.0):
        rate.observe(TOKENS, TOKENS / value)
    assert rate.value() is None
    rate.observe(TOKENS, TOKENS / 2000.0)
    assert rate.value() == pytest.approx(2000.0)
    for _ in range(SAMPLES_KEPT):
        rate.observe(TOKENS, TOKENS / 5000.0)
    assert rate.value() == pytest.approx(5000.0)


def test_samples_of_too_little_work_or_no_time_are_ignored() -> None:
    rate = Rate()
    for _ in range(SAMPLES_MIN):
        rate.observe(TOKENS_MIN - 1, 1.0)
        rate.observe(TOKENS, 0.0)
    assert rate.value() is None


def test_loading_pays_until_measured_otherwise() -> None:
    assert LoadOrRecompute(Rate()).pays
    break_even = LoadOrRecompute(Rate())
    load_at(break_even, 1.0)
    assert break_even.pays, "the rate of computing was not measured yet"
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 1.0, times=SAMPLES_MIN - 1)
    assert break_even.pays, "too few loads"


def test_loading_stops_below_the_threshold_only() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 1000 * STOP_BELOW * 1.01)
    assert break_even.pays
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 1000 * STOP_BELOW * 0.99)
    assert not break_even.pays


def test_if_switched_off_loading_always_pays() -> None:
    break_even = LoadOrRecompute(prefill_of(1000), enabled=False)
    load_at(break_even, 1.0)
    assert break_even.pays


def test_one_slow_load_among_good_ones_changes_nothing() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 2000.0)
    load_at(break_even, 1.0, times=1)
    assert break_even.pays


def test_a_probe_must_be_clearly_faster() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 500.0, now=10.0)
    assert not break_even.probe_due(10.0 + RETRY_S - 0.1)
    assert break_even.probe_due(10.0 + RETRY_S)
    probe_at(break_even, 1000 * RESUME_ABOVE * 0.99, 15.0)
    assert not break_even.pays
    probe_at(break_even, 1000 * RESUME_ABOVE * 1.01, 30.0)
    assert break_even.pays
    assert break_even.rate.value() is None, "earlier measurements must no longer count"


def test_a_slower_tier_pays_for_requests_that_wait_unless_it_is_much_slower() -> None:
    for share in (2 * AHEAD_SHARE, AHEAD_SHARE / 2):
        pace = LoadOrRecompute(prefill_of(1000))
        assert pace.pays_ahead, "nothing was measured yet"
        load_at(pace, 1000 * share)
        assert not pace.pays
        assert pace.pays_ahead == (share > AHEAD_SHARE)


def test_a_probe_shows_whether_a_slower_tier_still_pays_for_requests_that_wait() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 500.0)
    probe_at(pace, 50.0, RETRY_S)
    assert not pace.pays_ahead
    probe_at(pace, 500.0, 100.0)
    assert pace.pays_ahead
    assert not pace.pays


def test_probes_come_after_waits_that_double_up_to_a_bound() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 500.0, now=0.0)
    now, waits = 0.0, []
    for _ in range(6):
        began = now
        while not break_even.probe_due(now):
            now += 1.0
        waits.append(now - began)
        probe_at(break_even, 500.0, now)
    assert waits == [5.0, 10.0, 20.0, 40.0, RETRY_MAX_S, RETRY_MAX_S]


def test_a_probe_that_loaded_nothing_is_a_slow_probe() -> None:
    for prefill in (Rate(), prefill_of(1000)):
        break_even = LoadOrRecompute(prefill)
        break_even.pays = False
        break_even.observe_probe(0, 0.001, now=100.0)
        assert not break_even.pays
        assert not break_even.probe_due(100.1)


def test_a_tier_that_pays_only_without_traffic_is_tried_less_and_less_often() -> None:
    """Probes run without traffic: for 600 s, probes are fast and loads slow."""
    break_even, now, resumed = LoadOrRecompute(prefill_of(1000)), 0.0, []
    while now < 600.0:
        if break_even.pays:
            load_at(break_even, 100.0, now, times=1)
        elif break_even.probe_due(now):
            probe_at(break_even, 5000.0, now)
            resumed.append(now)
        now += 1.0
    assert len(resumed) < 16, (
        f"probes must come once a minute in the end, not every five seconds: {resumed}"
    )
    gaps = [after - before for before, after in itertools.pairwise(resumed)]
    assert gaps[-1] >= RETRY_MAX_S


def test_loads_that_pay_make_the_next_wait_short_again() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 500.0, now=0.0)
    for now in (5.0, 15.0, 35.0):
        probe_at(break_even, 500.0, now)
    probe_at(break_even, 5000.0, 100.0)
    load_at(break_even, 5000.0, 101.0, times=SAMPLES_KEPT)
    load_at(break_even, 500.0, 200.0, times=SAMPLES_KEPT)
    assert not break_even.pays
    assert break_even.probe_due(200.0 + RETRY_S)


def test_between_the_thresholds_nothing_changes() -> None:
    """If loads and probes are exactly as fast as computing, neither state changes."""
    paying = LoadOrRecompute(prefill_of(1000))
    load_at(paying, 1000.0, times=50)
    assert paying.pays
    stopped = LoadOrRecompute(prefill_of(1000))
    stopped.pays = False
    for now in range(0, 1000, 10):
        probe_at(stopped, 1000.0, now)
    assert not stopped.pays


def short_loads(
    break_even: LoadOrRecompute, seconds: float, now: float, times: int = SAMPLES_MIN
) -> None:
    for _ in range(times):
        break_even.observe_load(TOKENS_MIN - 1, seconds, now)


def test_a_load_must_have_more_tokens_than_are_computed_during_a_short_load() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    short_loads(break_even, 0.2, 0.0, SAMPLES_MIN - 1)
    assert break_even.tokens_min == 0, "too few loads"
    short_loads(break_even, 0.2, 0.0, 1)
    assert break_even.tokens_min == pytest.approx(STOP_BELOW * 1000 * 0.2)


def test_every_load_pays_if_switched_off_or_the_computing_rate_is_unknown() -> None:
    for break_even in (LoadOrRecompute(Rate()), LoadOrRecompute(prefill_of(1000), enabled=False)):
        short_loads(break_even, 9.0, 0.0)
        assert break_even.tokens_min == 0


def test_long_loads_do_not_affect_the_smallest_load() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    load_at(break_even, 2000)
    assert break_even.tokens_min == 0


def test_times_of_short_loads_are_forgotten_so_that_they_are_tried_again() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    short_loads(break_even, 0.2, now=10.0)
    break_even.tick(10.0 + FORGET_S)
    assert break_even.tokens_min > 0
    break_even.tick(10.1 + FORGET_S)
    assert break_even.tokens_min == 0


def test_a_tier_is_measured_by_all_that_it_delivers_during_a_load() -> None:
    """Four loads share a tier that alone is twice as fast as computing."""
    break_even = LoadOrRecompute(prefill_of(1000))
    for _ in range(SAMPLES_MIN):
        break_even.observe_load(TOKENS, 4 * TOKENS / 2000, 0.0, before=3 * TOKENS)
    assert break_even.rate.value() == pytest.approx(2000)
    assert break_even.pays


def test_a_short_load_behind_long_ones_is_not_a_sample() -> None:
    break_even = LoadOrRecompute(prefill_of(1000))
    for _ in range(SAMPLES_MIN):
        break_even.observe_load(TOKENS_MIN - 1, 1.0, 0.0, before=TOKENS)
    assert break_even.rate.value() is None


def test_a_tier_that_pays_again_has_the_speed_of_its_probe() -> None:
    break_even = LoadOrRecompute(prefill_of(1000), timeout_s=10.0)
    load_at(break_even, 500.0)
    probe_at(break_even, 5000.0, 100.0)
    in_time = 10 * DEADLINE_SHARE * 5000
    assert break_even.part(10**6, 0) == (in_time, ShortenReason.DEADLINE)
    load_at(break_even, 2000.0, 101.0)
    assert break_even.part(10**6, 0) == (10 * DEADLINE_SHARE * 2000, ShortenReason.DEADLINE)


def test_what_can_be_read_in_time_may_be_too_little() -> None:
    break_even = LoadOrRecompute(prefill_of(1000), timeout_s=1.0)
    load_at(break_even, 2000)
    short_loads(break_even, 2.0, 0.0)
    assert break_even.tokens_min > 1000
    assert break_even.part(5000, 0) == (0, ShortenReason.DEADLINE)
    assert break_even.part(500, 0) == (0, ShortenReason.SHORT)


def test_for_a_request_that_waits_anyway_the_queue_of_the_disk_does_not_matter() -> None:
    """The whole prefix is read for such a request, even the part that a load could not read in
    time. A short piece is still computed."""
    break_even = LoadOrRecompute(prefill_of(1000), timeout_s=1.0)
    load_at(break_even, 2000)
    for job in (1, 2):
        break_even.reads.begin(job, 4000)
    assert break_even.part(4000, 0) == (0, ShortenReason.QUEUE)
    assert break_even.part(4000, None) == (4000, ShortenReason.NOTHING)
    for job in (1, 2):
        break_even.reads.end(job)
    assert break_even.part(4000, 0) == (2000 * DEADLINE_SHARE, ShortenReason.DEADLINE)
    short_loads(break_even, 2.0, 0.0)
    assert break_even.part(500, None) == (0, ShortenReason.SHORT)


def test_without_other_loads_a_tier_is_still_measured_after_computing_has_become_faster() -> None:
    prefill = prefill_of(1000)
    break_even = LoadOrRecompute(prefill)
    load_at(break_even, 1250)
    for _ in range(SAMPLES_KEPT):
        prefill.observe(TOKENS, TOKENS / 4000)
    assert break_even.part(TOKENS, 0) == (TOKENS, ShortenReason.NOTHING)


def test_a_hit_is_looked_at_only_if_something_could_cut_it() -> None:
    break_even = LoadOrRecompute(prefill_of(1000), timeout_s=10.0)
    assert not break_even.may_cut(10**9), "the tier was not measured yet"
    load_at(break_even, 2000)
    in_time = int(10 * DEADLINE_SHARE * 2000)
    assert not break_even.may_cut(in_time)
    assert break_even.may_cut(in_time + 1)
    break_even.reads.begin(1, 1)
    assert break_even.may_cut(1)

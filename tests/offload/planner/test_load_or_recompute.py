"""Break-even: what is measured, when loading stops and resumes, and that the decision is stable."""

from __future__ import annotations

import itertools

import pytest

from offload.planner.load_or_recompute import (
    DEADLINE_SHARE,
    FORGET_S,
    RESUME_ABOVE,
    RETRY_MAX_S,
    RETRY_S,
    SAMPLES_KEPT,
    SAMPLES_MIN,
    STOP_BELOW,
    TOKENS_MIN,
    Cut,
    LoadOrRecompute,
    Rate,
)

TOKENS = 1000


def prefill_of(rate: float) -> Rate:
    """Tokens per second, measured often enough."""
    prefill = Rate()
    for _ in range(SAMPLES_MIN):
        prefill.observe(TOKENS, TOKENS / rate)
    return prefill


def load_at(pace: LoadOrRecompute, rate: float, now: float = 0.0, times: int = SAMPLES_MIN) -> None:
    for _ in range(times):
        pace.observe_load(TOKENS, TOKENS / rate, now)


def probe_at(pace: LoadOrRecompute, rate: float, now: float) -> None:
    pace.observe_probe(TOKENS, TOKENS / rate, now)


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
    pace = LoadOrRecompute(Rate())
    load_at(pace, 1.0)
    assert pace.pays, "the rate of computing was not measured yet"
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 1.0, times=SAMPLES_MIN - 1)
    assert pace.pays, "too few loads"


def test_loading_stops_below_the_threshold_only() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 1000 * STOP_BELOW * 1.01)
    assert pace.pays
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 1000 * STOP_BELOW * 0.99)
    assert not pace.pays


def test_if_switched_off_loading_always_pays() -> None:
    pace = LoadOrRecompute(prefill_of(1000), enabled=False)
    load_at(pace, 1.0)
    assert pace.pays


def test_one_slow_load_among_good_ones_changes_nothing() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 2000.0)
    load_at(pace, 1.0, times=1)
    assert pace.pays


def test_a_probe_must_be_clearly_faster() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 500.0, now=10.0)
    assert not pace.probe_due(10.0 + RETRY_S - 0.1)
    assert pace.probe_due(10.0 + RETRY_S)
    probe_at(pace, 1000 * RESUME_ABOVE * 0.99, 15.0)
    assert not pace.pays
    probe_at(pace, 1000 * RESUME_ABOVE * 1.01, 30.0)
    assert pace.pays
    assert pace.rate.value() is None, "earlier measurements must no longer count"


def test_probes_come_after_waits_that_double_up_to_a_bound() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 500.0, now=0.0)
    now, waits = 0.0, []
    for _ in range(6):
        began = now
        while not pace.probe_due(now):
            now += 1.0
        waits.append(now - began)
        probe_at(pace, 500.0, now)
    assert waits == [5.0, 10.0, 20.0, 40.0, RETRY_MAX_S, RETRY_MAX_S]


def test_a_probe_that_loaded_nothing_is_a_slow_probe() -> None:
    for prefill in (Rate(), prefill_of(1000)):
        pace = LoadOrRecompute(prefill)
        pace.pays = False
        pace.observe_probe(0, 0.001, now=100.0)
        assert not pace.pays
        assert not pace.probe_due(100.1)


def test_a_tier_that_pays_only_without_traffic_is_tried_less_and_less_often() -> None:
    """Probes run without traffic: for 600 s, probes are fast and loads slow."""
    pace, now, resumed = LoadOrRecompute(prefill_of(1000)), 0.0, []
    while now < 600.0:
        if pace.pays:
            load_at(pace, 100.0, now, times=1)
        elif pace.probe_due(now):
            probe_at(pace, 5000.0, now)
            resumed.append(now)
        now += 1.0
    assert len(resumed) < 16, (
        f"probes must come once a minute in the end, not every five seconds: {resumed}"
    )
    gaps = [after - before for before, after in itertools.pairwise(resumed)]
    assert gaps[-1] >= RETRY_MAX_S


def test_loads_that_pay_make_the_next_wait_short_again() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 500.0, now=0.0)
    for now in (5.0, 15.0, 35.0):
        probe_at(pace, 500.0, now)
    probe_at(pace, 5000.0, 100.0)
    load_at(pace, 5000.0, 101.0, times=SAMPLES_KEPT)
    load_at(pace, 500.0, 200.0, times=SAMPLES_KEPT)
    assert not pace.pays
    assert pace.probe_due(200.0 + RETRY_S)


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
    pace: LoadOrRecompute, seconds: float, now: float, times: int = SAMPLES_MIN
) -> None:
    for _ in range(times):
        pace.observe_load(TOKENS_MIN - 1, seconds, now)


def test_a_load_must_have_more_tokens_than_are_computed_during_a_short_load() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    short_loads(pace, 0.2, 0.0, SAMPLES_MIN - 1)
    assert pace.tokens_min == 0, "too few loads"
    short_loads(pace, 0.2, 0.0, 1)
    assert pace.tokens_min == pytest.approx(STOP_BELOW * 1000 * 0.2)


def test_every_load_pays_if_switched_off_or_the_computing_rate_is_unknown() -> None:
    for pace in (LoadOrRecompute(Rate()), LoadOrRecompute(prefill_of(1000), enabled=False)):
        short_loads(pace, 9.0, 0.0)
        assert pace.tokens_min == 0


def test_long_loads_do_not_affect_the_smallest_load() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    load_at(pace, 2000)
    assert pace.tokens_min == 0


def test_times_of_short_loads_are_forgotten_so_that_they_are_tried_again() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    short_loads(pace, 0.2, now=10.0)
    pace.tick(10.0 + FORGET_S)
    assert pace.tokens_min > 0
    pace.tick(10.1 + FORGET_S)
    assert pace.tokens_min == 0


def test_a_tier_is_measured_by_all_that_it_delivers_during_a_load() -> None:
    """Four loads share a tier that alone is twice as fast as computing."""
    pace = LoadOrRecompute(prefill_of(1000))
    for _ in range(SAMPLES_MIN):
        pace.observe_load(TOKENS, 4 * TOKENS / 2000, 0.0, before=3 * TOKENS)
    assert pace.rate.value() == pytest.approx(2000)
    assert pace.pays


def test_a_short_load_behind_long_ones_is_no_sample() -> None:
    pace = LoadOrRecompute(prefill_of(1000))
    for _ in range(SAMPLES_MIN):
        pace.observe_load(TOKENS_MIN - 1, 1.0, 0.0, before=TOKENS)
    assert pace.rate.value() is None


def test_a_tier_that_pays_again_has_the_speed_of_its_probe() -> None:
    pace = LoadOrRecompute(prefill_of(1000), timeout_s=10.0)
    load_at(pace, 500.0)
    probe_at(pace, 5000.0, 100.0)
    in_time = 10 * DEADLINE_SHARE * 5000
    assert pace.part(10**6, 0) == (in_time, Cut.DEADLINE)
    load_at(pace, 2000.0, 101.0)
    assert pace.part(10**6, 0) == (10 * DEADLINE_SHARE * 2000, Cut.DEADLINE)


def test_what_can_be_read_in_time_may_be_too_little() -> None:
    pace = LoadOrRecompute(prefill_of(1000), timeout_s=1.0)
    load_at(pace, 2000)
    short_loads(pace, 2.0, 0.0)
    assert pace.tokens_min > 1000
    assert pace.part(5000, 0) == (0, Cut.DEADLINE)
    assert pace.part(500, 0) == (0, Cut.SHORT)


def test_for_a_request_that_waits_anyway_the_queue_of_the_disk_does_not_matter() -> None:
    """The whole prefix is read for such a request, even the part that a load could not read in
    time. A short piece is still computed."""
    pace = LoadOrRecompute(prefill_of(1000), timeout_s=1.0)
    load_at(pace, 2000)
    for job in (1, 2):
        pace.reads.begin(job, 4000)
    assert pace.part(4000, 0) == (0, Cut.QUEUE)
    assert pace.part(4000, None) == (4000, Cut.NOTHING)
    for job in (1, 2):
        pace.reads.end(job)
    assert pace.part(4000, 0) == (2000 * DEADLINE_SHARE, Cut.DEADLINE)
    short_loads(pace, 2.0, 0.0)
    assert pace.part(500, None) == (0, Cut.SHORT)


def test_a_hit_is_looked_at_only_if_something_could_cut_it() -> None:
    pace = LoadOrRecompute(prefill_of(1000), timeout_s=10.0)
    assert not pace.may_cut(10**9), "the tier was not measured yet"
    load_at(pace, 2000)
    in_time = int(10 * DEADLINE_SHARE * 2000)
    assert not pace.may_cut(in_time)
    assert pace.may_cut(in_time + 1)
    pace.reads.begin(1, 1)
    assert pace.may_cut(1)

"""TierHealths as the planner uses them: reading, break-even and the log."""

from __future__ import annotations

import logging

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU, group_suffix
from offload.messages.plan import IN_SLAB, STAGED
from offload.messages.report import JobResult
from offload.planner.circuit_breaker import BreakerState
from offload.planner.load_or_recompute import SAMPLES_MIN
from offload.planner.planner import Planner
from offload.planner.tier_health import HealthLimits, TierHealths
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import key_of
from tests.offload.planner.troubled_tiers import (
    FAILURES,
    TOKENS,
    WAIT_S,
    answer,
    break_reads,
    break_writes,
    found,
    make,
    probe_of,
    recover,
    report_seen,
    step,
    store,
    wanted,
)

# -- reading -----------------------------------------------------------------------------------


def test_a_tier_that_fails_is_left_out_of_lookups() -> None:
    planner = make()
    recover(planner, 1, 2)
    assert found(planner, 1)
    for _ in range(FAILURES - 1):
        report_seen(planner, reads_failed=1)
        assert found(planner, 1)
    report_seen(planner, reads_failed=1)
    assert not found(planner, 1)
    assert planner.totals()["breaker_openings:disk0"] == 1


def test_chunks_in_the_cpu_tier_are_still_found() -> None:
    planner = make()
    planner.stores.plan(wanted(1))
    answer(planner, step(planner, 0.0).stores[0].job)
    recover(planner, 2)
    break_reads(planner)
    assert found(planner, 1)
    assert not found(planner, 2)


def test_a_chunk_of_an_unavailable_tier_is_stored_again() -> None:
    planner = make()
    recover(planner, 1)
    break_reads(planner)
    assert planner.stores.plan(wanted(1)) == 1
    assert step(planner, 0.0).stores[0].slots == (0,)


def test_one_probe_at_a_time_after_the_wait_closes_the_breaker() -> None:
    planner = make()
    recover(planner, *range(5))
    health = break_reads(planner)
    assert step(planner, WAIT_S - 0.1).loads == ()
    probe = probe_of(step(planner, WAIT_S))
    assert {(item.slot, item.tier, item.blocks) for item in probe.items} == {(STAGED, 0, ())}
    assert {item.key for item in probe.items} == {key_of(n) for n in range(5)}
    for later in (WAIT_S, 100.0, 1000.0):
        assert step(planner, later).loads == ()
        assert not found(planner, 1), "no request must wait for the probe"
    answer(planner, probe.job, JobResult(seconds=0.1))
    assert health.reads.closed
    assert found(planner, 1)
    assert not planner.busy


def test_a_failed_probe_makes_the_next_wait_longer() -> None:
    planner = make()
    recover(planner, 1)
    health = break_reads(planner)
    probe = probe_of(step(planner, WAIT_S))
    answer(planner, probe.job, JobResult(failed=True))
    assert health.reads.state is BreakerState.OPEN
    assert step(planner, 2 * WAIT_S).loads == ()
    assert probe_of(step(planner, 3 * WAIT_S)).job != probe.job


def test_a_probe_needs_every_rank() -> None:
    planner = make(ranks=2)
    recover(planner, 1)
    health = break_reads(planner)
    probe = probe_of(step(planner, WAIT_S))
    report_seen(planner, rank=0, reads_good=1)
    answer(planner, probe.job)
    assert not health.reads.closed
    answer(planner, probe.job, JobResult(failed=True))
    assert health.reads.state is BreakerState.OPEN


def test_a_probe_that_hangs_reopens_the_breaker_and_is_not_followed_by_another() -> None:
    planner = make()
    recover(planner, 1)
    health = break_reads(planner)
    probe = probe_of(step(planner, WAIT_S))
    report_seen(planner, reads_failed=1)  # the probe is late
    assert health.reads.state is BreakerState.OPEN
    for now in (100.0, 200.0, 300.0):
        assert step(planner, now).loads == ()
        assert not found(planner, 1)
    answer(planner, probe.job, JobResult(failed=True))
    assert probe_of(step(planner, 1000.0))


def test_a_probe_of_an_empty_tier_waits_for_a_first_record() -> None:
    planner = make()
    health = break_reads(planner)
    for now in (WAIT_S, 2 * WAIT_S, 1000.0):
        assert step(planner, now).loads == ()
        assert not planner.busy
    assert health.reads.state is BreakerState.HALF_OPEN
    recover(planner, 1)
    answer(planner, probe_of(step(planner, 1001.0)).job)
    assert found(planner, 1)


def test_a_probe_that_finds_damaged_records_is_good_and_forgets_them() -> None:
    planner = make()
    recover(planner, 1, 2)
    health = break_reads(planner)
    lost = frozenset({key_of(1)})
    answer(planner, probe_of(step(planner, WAIT_S)).job, JobResult(bad=lost, lost=lost))
    assert health.reads.closed
    assert not found(planner, 1)
    assert found(planner, 2)
    assert step(planner, WAIT_S).deletes == {0: (key_of(1),)}


def test_a_probe_that_loads_nothing_is_bad() -> None:
    planner = make()
    recover(planner, 1)
    health = break_reads(planner)
    bad = frozenset({key_of(1)})
    answer(planner, probe_of(step(planner, WAIT_S)).job, JobResult(bad=bad))
    assert health.reads.state is BreakerState.OPEN


def test_a_probe_interrupted_by_a_reset_says_nothing_about_the_tier() -> None:
    planner = make()
    recover(planner, 1)
    health = break_reads(planner)
    probe = probe_of(step(planner, WAIT_S))
    planner.forget_all()
    planner.begin_epochs({0: 1})
    answer(planner, probe.job, JobResult(failed=True))
    assert health.reads.state is BreakerState.HALF_OPEN
    recover(planner, 2)
    answer(planner, probe_of(step(planner, WAIT_S)).job)
    assert found(planner, 2)


def test_chunks_under_a_probe_are_not_evicted() -> None:
    planner = make(slots=64)
    recover(planner, *range(64))
    break_reads(planner)
    probe = probe_of(step(planner, WAIT_S))
    planner.stores.plan(wanted(*range(100, 110)))
    answer(planner, step(planner, WAIT_S).stores[0].job)
    assert step(planner, WAIT_S).write_throughs == (), "the tier is full of pinned chunks"
    answer(planner, probe.job)
    assert found(planner, 63)
    store(planner, 200)
    assert planner.stats.tier(0).evicted_chunks == 1, "and then they may be evicted again"


def test_a_failing_tier_does_not_stop_the_other() -> None:
    planner = make(tiers=2)
    recover(planner, 1, 2, tier=0)
    recover(planner, 2, 3, tier=1)
    break_reads(planner, 0)
    assert [found(planner, n) for n in (1, 2, 3)] == [False, True, True]
    planner.loads.plan("r", [wanted(2, 3)])
    assert [item.tier for item in step(planner, 0.0).loads[0].items] == [1, 1]


def test_a_chunk_on_its_way_from_an_unavailable_tier_is_read_from_the_other() -> None:
    planner = make(tiers=2)
    recover(planner, 1, tier=0)
    recover(planner, 1, tier=1)
    planner.loads.plan("hung", [wanted(1)])
    (hung,) = step(planner, 0.0).loads
    assert hung.items[0].tier == 0
    break_reads(planner, 0)
    assert found(planner, 1)
    planner.loads.plan("r", [wanted(1, block=9)])
    (load,) = step(planner, 0.0).loads
    assert (load.items[0].tier, load.items[0].slot) == (1, STAGED)
    answer(planner, load.job)
    answer(planner, hung.job, JobResult(failed=True))
    planner.check()


def test_a_chunk_on_its_way_is_shared_while_its_tier_is_available() -> None:
    planner = make(tiers=2)
    recover(planner, 1, tier=0)
    planner.loads.plan("a", [wanted(1)])
    planner.loads.plan("b", [wanted(1, block=9)])
    first, second = step(planner, 0.0).loads
    assert (second.items[0].tier, second.items[0].slot) == (IN_SLAB, first.items[0].slot)


def test_a_chunk_on_its_way_is_shared_although_another_tier_is_unavailable() -> None:
    planner = make(tiers=2)
    recover(planner, 1, tier=0)
    break_reads(planner, 1)
    planner.loads.plan("a", [wanted(1)])
    planner.loads.plan("b", [wanted(1, block=9)])
    first, second = step(planner, 0.0).loads
    assert (second.items[0].tier, second.items[0].slot) == (IN_SLAB, first.items[0].slot)


def test_a_hung_load_returns_its_budget_when_its_request_has_ended() -> None:
    planner = make(load_blocks=4)
    recover(planner, *range(6))
    planner.loads.plan("hung", [wanted(0, 1, 2)])
    job = step(planner, 0.0).loads[0].job
    assert not planner.loads.can_load(2, 2)
    planner.loads.request_ended("hung")
    assert planner.loads.can_load(2, 2)
    planner.loads.plan("next", [wanted(4, 5)])
    next_job = step(planner, 0.0).loads[0].job
    answer(planner, job, JobResult(failed=True))
    assert not planner.loads.can_load(3, 3), "the late answer of the hung load counts only once"
    answer(planner, next_job)
    assert planner.loads.can_load(4, 4)


# -- break-even --------------------------------------------------------------------------------


def compute_at(planner: Planner, rate: float) -> None:
    for _ in range(SAMPLES_MIN):
        planner.health.computed(TOKENS, TOKENS / rate)


def load_at(planner: Planner, rate: float, now: float) -> None:
    """One request's load of one chunk from the tier, directly to the GPU."""
    assert found(planner, 1)
    planner.loads.plan("r", [wanted(1)])
    (load,) = step(planner, now).loads
    # It is not kept in the CPU tier, so that the next load comes from the lower tier again.
    bad = JobResult(seconds=TOKENS / rate)
    planner.cpu.drop([key_of(1)])
    answer(planner, load.job, bad)


def test_a_tier_slower_than_computing_is_left_out_and_probed() -> None:
    planner = make()
    recover(planner, 1)
    compute_at(planner, 1000.0)
    for _ in range(SAMPLES_MIN):
        load_at(planner, 100.0, 0.0)
    assert not found(planner, 1)
    assert planner.health[0].writable, "only reading is too slow"
    assert step(planner, WAIT_S - 1).loads == ()
    probe = probe_of(step(planner, WAIT_S))
    answer(planner, probe.job, JobResult(seconds=TOKENS / 100.0))
    assert not found(planner, 1)
    assert step(planner, WAIT_S + 1).loads == ()
    answer(planner, probe_of(step(planner, 100.0)).job, JobResult(seconds=TOKENS / 5000.0))
    assert found(planner, 1)


def test_a_load_from_the_cpu_tier_says_nothing_about_the_tier_below() -> None:
    planner = make()
    compute_at(planner, 1e9)
    planner.stores.plan(wanted(1))
    answer(planner, step(planner, 0.0).stores[0].job)
    recover(planner, 2)
    for _ in range(10):
        planner.loads.plan("r", [wanted(1)])
        (load,) = step(planner, 0.0).loads
        answer(planner, load.job, JobResult(seconds=100.0))
    assert found(planner, 2)


def test_in_a_hundred_minutes_of_a_slow_tier_only_a_few_requests_try_it() -> None:
    """Loads run at half the speed of computing, and probes at twice the speed of computing, because
    no other reads run at the same time."""
    planner = make()
    recover(planner, 1)
    compute_at(planner, 1000.0)
    tried, now = 0, 0.0
    while now < 6000.0:
        if found(planner, 1):
            load_at(planner, 500.0, now)
            tried += 1
        for load in step(planner, now).loads:
            answer(planner, load.job, JobResult(seconds=TOKENS / 2000.0))
        now += 1.0
    assert tried <= SAMPLES_MIN * 105, "only a few requests must try it"


# -- the log -----------------------------------------------------------------------------------


def test_a_request_waits_for_other_loads_if_computing_takes_longer() -> None:
    planner = make()
    recover(planner, *range(8))
    health = planner.health
    assert health.patience_s({CPU: 900}, 0) == 0, "the speed of computing is not known"
    compute_at(planner, rate=1000.0)
    assert health.patience_s({CPU: 900}, 100) == 1.0, "no read is in the way"
    assert health.patience_s({0: 900}, 100) == 0, "the speed of the tier is not known"
    for _ in range(SAMPLES_MIN):
        health[0].break_even.ahead_rate.observe(300, 0.1)
    assert health.patience_s({0: 900}, 100) == 1.0, "that of reads ahead is"
    for _ in range(SAMPLES_MIN):
        health[0].loaded(4000, 1.0, 0.0)
    assert health.patience_s({0: 900}, 100) == 1.0
    reads = health[0].break_even.reads
    reads.begin(1, 1000)
    assert health.patience_s({0: 900}, 100) == 1.0, "0.475 s of reads"
    reads.begin(2, 200)
    assert health.patience_s({0: 900}, 100) == 0, "0.525 s of reads"
    assert health.patience_s({CPU: 900}, 200) == 1.1, "its own tokens are in the CPU tier"
    health.load_timeout_s = 0.5
    assert health.patience_s({CPU: 900}, 200) == 0.5


def test_without_break_even_a_request_waits_as_long_as_for_a_load() -> None:
    health = TierHealths(["lmdb"], HealthLimits(break_even=False, load_timeout_s=7.0))
    assert health.patience_s({0: 10**6}, 0) == 7.0


def test_every_change_of_health_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    planner = make()
    recover(planner, 1)
    with caplog.at_level(logging.WARNING, "offload.planner.tier_health"):
        break_reads(planner)
        for now in (1.0, 2.0, 3.0):
            step(planner, now)
        probe = probe_of(step(planner, WAIT_S))
        answer(planner, probe.job, JobResult(failed=True))
        answer(planner, probe_of(step(planner, 4 * WAIT_S)).job)
        break_writes(planner)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "kvtiers: tier disk0 failed and is no longer read; it is probed from time to time",
        "kvtiers: tier disk0 is read again",
        "kvtiers: tier disk0 failed and is no longer written; it is probed from time to time",
    ]


def test_a_rank_that_lost_its_records_empties_the_tier_on_all_ranks() -> None:
    """A chunk is present on every rank or not at all; the other tier keeps its records."""
    planner = make(tiers=2, ranks=2)
    recover(planner, 1, 2, 3)
    recover(planner, 2, tier=1)
    planner.loads.plan("r", [wanted(1)])
    report_seen(planner, rank=1, losses=1)
    assert len(planner.lower[0]) == 0
    assert [planner.sources.present(key_of(n)) for n in (2, 3)] == [True, False]
    plan = step(planner, 1.0)
    assert set(plan.deletes[0]) == {key_of(1), key_of(2), key_of(3)}
    assert 1 not in plan.deletes
    answer(planner, plan.loads[0].job)
    answer(planner, plan.loads[0].job)
    planner.check()


def test_one_late_load_ends_the_use_of_a_slow_tier() -> None:
    """The late load's request has waited without a result; the next request must not."""
    planner = make()
    recover(planner, 1)
    compute_at(planner, 1000.0)
    for _ in range(8):
        load_at(planner, 5000.0, 0.0)
    assert found(planner, 1)
    planner.loads.plan("late", [wanted(1)])
    (load,) = step(planner, 0.0).loads
    answer(planner, load.job, JobResult(failed=True, late=True, seconds=10.0))
    assert not found(planner, 1)
    assert planner.health[0].reads.closed, "no single read was late, only the load"


def test_a_load_mostly_from_elsewhere_says_nothing_about_the_tier() -> None:
    planner = make(slots=16)
    compute_at(planner, 20_000.0)
    planner.stores.plan(wanted(*range(2, 12)))
    answer(planner, step(planner, 0.0).stores[0].job)
    recover(planner, 1)
    for _ in range(8):
        # one chunk from the disk, ten from the CPU tier
        planner.loads.plan("r", [wanted(*range(1, 12))])
        (load,) = step(planner, 0.0).loads
        planner.cpu.drop([key_of(1)])
        answer(planner, load.job, JobResult(seconds=0.2))
    assert found(planner, 1)
    assert planner.health[0].break_even.tokens_min == 0


def test_a_probe_counts_tokens_like_a_load() -> None:
    """Chunks of several groups cover the same tokens."""
    groups = {n: GroupInfo("full", TOKENS, (100,)) for n in range(4)}
    lower = TierIndex("disk", ByteCapacity(6400), LruPolicy())
    planner = Planner(groups, TierIndex("cpu", SlotCapacity(8), LruPolicy()), [lower])
    keys = [b"chunk" + group_suffix(n) for n in range(4)]
    lower.recover(keys, [EntryInfo(n, size_bytes=100) for n in range(4)])
    planner.probes.plan(0, 0.0)
    (opened,) = planner.jobs.jobs()
    assert (opened.job, opened.tokens_by_tier) == (planner.health[0].probe, {0: TOKENS})

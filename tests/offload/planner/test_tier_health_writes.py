"""TierHealths as the planner uses them: writing to a failing tier."""

from __future__ import annotations

from offload.messages.report import JobResult
from offload.planner.circuit_breaker import BreakerState
from offload.planner.write_through import QueueSettings
from policies.admission import WriteBudget
from policies.base import EntryInfo
from tests.offload.planner.simulated_ranks import GROUP, key_of
from tests.offload.planner.troubled_tiers import (
    WAIT_S,
    answer,
    break_reads,
    break_writes,
    make,
    recover,
    step,
    store,
    wanted,
)


def test_an_open_breaker_stops_writes_and_their_pins() -> None:
    planner = make(slots=4)
    health = break_writes(planner)
    assert store(planner, 1, 2, 3, 4).write_throughs == ()
    assert store(planner, 5, 6, 7, 8).write_throughs == (), "the CPU tier must be able to evict"
    assert not health.writable
    assert health.readable, "reads may continue"
    assert not planner.busy


def test_queued_chunks_are_released_when_the_breaker_opens() -> None:
    planner = make(slots=4)
    planner.stores.plan(wanted(1, 2, 3, 4))
    answer(planner, step(planner, 0.0).stores[0].job)
    break_writes(planner)
    assert step(planner, 0.0).write_throughs == ()
    assert planner.stores.plan(wanted(5, 6, 7, 8)) == 4


def test_the_first_write_after_the_wait_decides() -> None:
    planner = make(slots=200)
    health = break_writes(planner)
    (write_through,) = store(planner, *range(50), now=WAIT_S).write_throughs
    assert health.writes.state is BreakerState.HALF_OPEN
    assert store(planner, *range(50, 100), now=WAIT_S).write_throughs == (), (
        "only one write at a time"
    )
    bad = frozenset(write_through.keys)
    answer(planner, write_through.job, JobResult(bad=bad))
    assert health.writes.state is BreakerState.OPEN
    (write_through,) = store(planner, *range(100, 110), now=4 * WAIT_S).write_throughs
    answer(planner, write_through.job, JobResult(bad=frozenset(write_through.keys[1:])))
    assert health.writes.closed
    assert store(planner, *range(110, 115), now=4 * WAIT_S).write_throughs


def test_a_hung_first_write_pins_only_its_own_chunks() -> None:
    planner = make(slots=200)
    break_writes(planner)
    (write_through,) = store(planner, *range(50), now=WAIT_S).write_throughs
    for start in range(50, 200, 10):
        store(planner, *range(start, start + 10), now=WAIT_S)
    assert planner.stores.plan(wanted(*range(200, 360))) == 160
    assert len(write_through.keys) == 32


def test_the_first_write_is_one_job_even_with_two_groups() -> None:
    planner = make(groups=(GROUP, 1))
    break_writes(planner)
    planner.tick(WAIT_S)
    info = EntryInfo(GROUP, size_bytes=100)
    keys = [key_of(1), (1).to_bytes(12, "big")]
    assert planner.cpu.recover(keys, [info] * 2) == []
    (queue,) = planner.write_through.queues
    for key in keys:
        queue.offer([key], [info])
    jobs, _evicted = queue.due()
    assert len(jobs) == 1


def test_an_open_breaker_delays_deletes() -> None:
    planner = make()
    break_writes(planner)
    planner.deletes.add(0, [key_of(1), key_of(2)])
    assert step(planner, 0.0).deletes == {}
    assert not planner.busy, "an idle engine does not step for them"
    assert step(planner, WAIT_S).deletes == {0: (key_of(1), key_of(2))}
    assert step(planner, WAIT_S).deletes == {}


def test_a_deletion_is_delivered_before_the_key_is_written_again() -> None:
    planner = make()
    break_writes(planner)
    planner.deletes.add(0, [key_of(1)])
    plan = store(planner, 1, now=0.0)
    assert (plan.deletes, plan.write_throughs) == ({}, ())
    planner.stores.plan(wanted(2))
    answer(planner, step(planner, 0.0).stores[0].job)
    planner.tick(WAIT_S)
    planner.stores.plan(wanted(3))
    first = step(planner, WAIT_S)
    assert first.deletes == {0: (key_of(1),)}


def test_resets_are_delivered_whatever_state_the_breakers_are_in() -> None:
    planner = make()
    break_reads(planner)
    break_writes(planner)
    planner.deletes.add(0, [key_of(1)])
    planner.forget_all()
    planner.begin_epochs({0: 7})
    plan = step(planner, 0.0)
    assert plan.reset
    assert plan.epochs == {0: 7}
    assert step(planner, WAIT_S).deletes == {}, "the reset has deleted the records already"


def test_uses_are_not_sent_to_a_tier_that_is_not_written() -> None:
    planner = make()
    recover(planner, 1)
    break_writes(planner)
    planner.recency.note_everywhere([key_of(1)])
    assert step(planner, 0.0).touches == {}


def test_nothing_queues_up_behind_a_write_that_hangs() -> None:
    """The breaker is half-open, and the one write that it allows never ends."""
    planner = make()
    recover(planner, 1, 2)
    break_writes(planner)
    store(planner, 3, now=0.0)
    store(planner, 4, now=0.0)
    hung = store(planner, 5, now=WAIT_S)
    write_throughs = hung.write_throughs or step(planner, WAIT_S).write_throughs
    assert write_throughs, "the write that serves as a probe"
    for _ in range(50):
        planner.recency.note_everywhere([key_of(2)])
        planner.deletes.add(0, [key_of(1)])
        plan = step(planner, WAIT_S)
        assert (plan.touches, plan.deletes) == ({}, {})
    answer(planner, write_throughs[0].job)
    plan = step(planner, WAIT_S)
    assert set(plan.deletes[0]) == {key_of(1)}


def test_a_change_of_weights_while_a_disk_is_unavailable() -> None:
    """The other tier continues; the unavailable one is neither read nor written before it has
    received the change."""
    planner = make(tiers=2)
    recover(planner, 1)
    planner.forget_all()
    planner.begin_epochs({1: 7})
    assert not planner.sources.present(key_of(1))
    planner.stores.plan(wanted(2))
    plan = step(planner, 0.0)
    assert plan.epochs == {1: 7}
    answer(planner, plan.stores[0].job)
    assert {job.tier for job in step(planner, 0.0).write_throughs} == {1}
    planner.begin_epochs({0: 3})
    assert planner.busy
    planner.stores.plan(wanted(3))
    plan = step(planner, 0.0)
    assert (plan.epochs, plan.reset) == ({0: 3}, False)
    answer(planner, plan.stores[0].job)
    assert {job.tier for job in step(planner, 0.0).write_throughs} == {0, 1}


def test_a_chunk_without_space_spends_no_budget() -> None:
    budget = WriteBudget(1.0, burst_bytes=250)
    planner = make(queue_settings=[QueueSettings([budget])], waiting_writes=1)
    info = EntryInfo(GROUP, size_bytes=1)
    keys = [key_of(n) for n in range(3)]
    planner.cpu.recover(keys, [info] * 3)
    (queue,) = planner.write_through.queues
    queue.offer(keys[:2], [info] * 2)
    assert (len(queue), queue.skipped, queue.refused) == (1, 1, 0)
    queue.clear()
    queue.offer(keys[2:], [info])
    assert (len(queue), queue.refused) == (1, 0), "100 of 250 bytes were spent before"

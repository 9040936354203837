"""A rank whose event loop or copies are blocked: how requests are answered, and how long steps
wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import offload.worker.executor
from offload.messages.plan import LoadItem, LoadJob, StepPlan, WriteThroughJob
from offload.planner.loads import MISSING_CHUNK
from offload.worker.executor import Executor
from offload.worker.open_loads import OpenLoads
from offload.worker.rank_health import PAUSE_S
from offload.worker.unanswered_jobs import Drained
from tests.clock import Clock
from tests.offload.small_model import BLOCKS, compute, keys, wrong_blocks
from tests.offload.worker.test_executor import KEYS, Rank, fill, load, rank_with, store
from tests.patience import PATIENCE_S
from tiers.copy.base import FutureTicket, Ticket
from tiers.testing.faults import HoldingTier, nth
from tiers.testing.memory_tier import MemoryTier


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.replace(offload.worker.executor, monkeypatch)


def pass_deadlines(clock: Clock, rank: Rank) -> None:
    clock.ahead_s += (
        rank.executor.limits.load_timeout_s + offload.worker.executor.LOOP_STALL_S + 1.0
    )


async def submitted(rank: Rank) -> None:
    """Run the loop until a copy into GPU blocks was submitted, which does not run."""
    for _ in range(1000):
        if not rank.engine.idle:
            return
        await asyncio.sleep(0)
    raise AssertionError("no copy was submitted")


@contextmanager
def copies_hang(rank: Rank) -> Iterator[None]:
    """Copies into GPU blocks that were submitted run only after this."""
    lane = rank.engine._load
    hanging, lane.queue = lane.queue, deque()
    try:
        yield
    finally:
        lane.queue.extendleft(reversed(hanging))


async def stored(rank: Rank) -> None:
    """Chunk 0 is in slot 0."""
    compute(rank.caches, keys(1), [1])
    rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
    assert not (await rank.turn()).report.results[1].failed


# -- loads ---------------------------------------------------------------------------------------


async def test_no_end_is_reported_while_a_copy_into_the_requests_blocks_runs(clock: Clock) -> None:
    """vLLM reuses the blocks as soon as the end is reported; here the process was stopped for
    seconds."""
    async with rank_with() as rank:
        await stored(rank)
        rank.executor.post(StepPlan(loads=(load(2, [0], [9]),)))
        await submitted(rank)
        for _ in range(3):  # the loop does not run from here on
            pass_deadlines(clock, rank)
            assert not rank.executor.drain().finished
        rank.engine.run_all()
        done = rank.executor.drain()
        assert (done.finished, done.failed) == ({"r2"}, {"r2"})
        compute(rank.caches, keys(1, 5), [9])  # the next owner of the block
        done = await rank.turn()
        assert not done.finished, "a request ends once"
        assert done.report.results.keys() == {2}
        assert wrong_blocks(rank.caches, keys(1, 5), [9]) == []


async def test_copies_that_never_end_affect_only_their_own_request(clock: Clock) -> None:
    """Later loads would wait behind these copies, so they fail at once, and their requests
    compute."""
    async with rank_with() as rank:
        await stored(rank)
        rank.executor.post(StepPlan(loads=(load(2, [0], [9]),)))
        await submitted(rank)
        with copies_hang(rank):
            pass_deadlines(clock, rank)
            assert not (await rank.turn()).finished
            before = rank.caches["layers.0"][10].clone()
            rank.executor.post(StepPlan(loads=(load(3, [0], [10]),)))
            done = await rank.turn()
            assert (done.finished, done.failed) == ({"r3"}, {"r3"})
            assert done.report.results[3].failed
            assert bool((rank.caches["layers.0"][10] == before).all())
        assert (await rank.turn()).failed == {"r2"}
        rank.executor.post(StepPlan(loads=(load(4, [0], [11]),)))
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r4"}, set())


async def test_an_abandoned_load_copies_nothing_when_the_loop_continues(clock: Clock) -> None:
    async with rank_with() as rank:
        await stored(rank)
        rank.executor.post(StepPlan(loads=(load(2, [0], [9]),)))
        pass_deadlines(clock, rank)
        assert rank.executor.drain().failed == {"r2"}
        compute(rank.caches, keys(1, 5), [9])
        assert (await rank.turn()).report.results[2].failed
        assert wrong_blocks(rank.caches, keys(1, 5), [9]) == []


async def test_a_blocked_loop_costs_a_request_at_most_its_deadline(
    clock: Clock,
) -> None:
    """The model-runner thread gives up the loop's loads, and if the loop continues, it copies
    nothing for them."""
    async with rank_with() as rank:
        await stored(rank)
        before = rank.caches["layers.0"].clone()
        rank.executor.post(StepPlan(loads=(load(2, [0], [9]),)))
        pass_deadlines(clock, rank)
        done = rank.executor.drain()
        assert (done.finished, done.failed) == ({"r2"}, {"r2"})
        assert "loop" in rank.executor.degraded
        rank.executor.post(StepPlan(loads=(load(3, [0], [9]),)))
        done = rank.executor.drain()
        assert (done.finished, done.failed) == ({"r3"}, {"r3"}), (
            "no further request must wait for the loop"
        )
        done = await rank.turn()
        assert not done.finished, "r2 has been answered"
        assert done.report.results[2].failed
        assert torch.equal(rank.caches["layers.0"], before)
        rank.executor.post(StepPlan(loads=(load(4, [0], [9]),)))
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r4"}, set()), (
            "the rank must work again when the loop does"
        )


def end_first(loads: OpenLoads, submit: Callable[[], Ticket | None]) -> Ticket | None:
    loads.end(1, is_ok=False)
    assert loads.take_ended() == [("r", False)]
    return submit()


def submit_first(loads: OpenLoads, submit: Callable[[], Ticket | None]) -> Ticket | None:
    ticket = submit()
    loads.end(1, is_ok=False)
    assert loads.take_ended() == []
    return ticket


@pytest.mark.parametrize("order", [end_first, submit_first, "in between"])
def test_a_concurrent_end_and_copy(order: Any) -> None:
    """Whichever comes first, no copy runs in blocks whose request was answered."""
    loads = OpenLoads()
    opened = loads.expect([LoadJob(1, "r", ())], 0.0)[1]
    ticket = FutureTicket()

    def submit() -> Ticket:
        if order == "in between":
            loads.end(1, is_ok=True)
            assert loads.take_ended() == []
        return ticket

    if order == "in between":
        found = opened.submit(submit)
    else:
        found = order(loads, lambda: opened.submit(submit))
    assert (found is None) == (order is end_first)
    assert bool(loads.take_ended()) is False
    ticket.finish(None)
    assert len(loads.take_ended()) == (order is not end_first)
    assert not loads.are_stuck


@pytest.mark.parametrize("first", [0, 1])
def test_an_end_is_reported_when_the_last_copy_has_ended(first: int) -> None:
    loads = OpenLoads()
    opened = loads.expect([LoadJob(1, "r", ())], 0.0)[1]
    tickets = [FutureTicket(), FutureTicket()]
    for ticket in tickets:
        assert opened.submit(lambda ticket=ticket: ticket) is ticket  # type: ignore[misc]  # mypy does not infer defaults
    loads.end(1, is_ok=False)
    assert loads.take_ended() == []
    tickets[first].finish(None)
    assert loads.take_ended() == [], "the other copy still writes into the request's blocks"
    tickets[1 - first].finish(None)
    assert loads.take_ended() == [("r", False)]


def test_an_abandoned_load_has_failed_however_it_ends() -> None:
    loads = OpenLoads()
    opened = loads.expect([LoadJob(1, "r", ())], 5.0)[1]
    ticket = FutureTicket()
    opened.submit(lambda: ticket)
    assert loads.give_up_overdue(6.0) == 1
    loads.end(1, is_ok=True)
    ticket.finish(None)
    assert loads.take_ended() == [("r", False)]


def test_a_copy_that_was_not_submitted_does_not_hold_its_request() -> None:
    loads = OpenLoads()
    opened = loads.expect([LoadJob(1, "r", ())], 0.0)[1]

    def submit() -> Ticket:
        raise RuntimeError("no stream")

    with pytest.raises(RuntimeError, match="no stream"):
        opened.submit(submit)
    loads.end(1, is_ok=False)
    assert loads.take_ended() == [("r", False)]


async def test_a_late_end_does_not_end_a_later_load_of_the_same_name(clock: Clock) -> None:
    """The first load of a request ends long after the request, whose name was reused."""
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier) as rank:
        await fill(rank, memory, 1)
        await stored(rank)
        first = LoadJob(2, "same", [LoadItem(KEYS[0], 0, (9,), 3, 0)])
        rank.executor.post(StepPlan(loads=(first,)))
        pass_deadlines(clock, rank)
        assert rank.executor.drain().failed == {"same"}
        await tier.waiting()
        assert not (await rank.turn()).finished, "its end was already reported"
        second = LoadJob(3, "same", [LoadItem(KEYS[0], 0, (10,), 0, -1)])
        rank.executor.post(StepPlan(loads=(second,)))
        await submitted(rank)
        tier.release()
        done = Drained()
        for _ in range(1000):  # until the first load has ended
            await asyncio.sleep(0)
            rank.add(done, rank.executor.drain())
        assert done.report.results.keys() == {2}
        assert not done.finished, "the second load is copying"
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"same"}, set())
        assert wrong_blocks(rank.caches, keys(1), [10]) == []


async def test_an_unreadable_part_ends_its_load_when_the_others_have_ended() -> None:
    """The load waits for copies that are under way."""
    async with rank_with() as rank:
        await stored(rank)
        first = LoadJob(2, "r2", [LoadItem(KEYS[0], 0, (9,), 0, -1)], 0, False)
        rank.executor.post(StepPlan(loads=(first,)))
        await submitted(rank)
        odd: Any = LoadItem(KEYS[0], 0, (10,), [], -1)  # no slot
        rank.executor.post(StepPlan(loads=(LoadJob(2, "r2", [odd], 1, False),)))
        for _ in range(20):
            await asyncio.sleep(0)
            assert not rank.executor.drain().finished, "a copy is in progress"
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r2"}, {"r2"})
        assert done.report.results[2].failed


# -- stores --------------------------------------------------------------------------------------


async def test_stores_continue_when_the_loop_does(clock: Clock) -> None:
    async with rank_with() as rank:
        rank.executor.post(StepPlan(loads=(LoadJob(1, "r1", (MISSING_CHUNK,)),)))
        pass_deadlines(clock, rank)
        assert rank.executor.drain().failed == {"r1"}
        assert rank.executor.degraded
        rank.executor.post(StepPlan(stores=(store(2, [1], [0]),)))
        assert rank.executor.drain().report.results[2].failed, "no step must wait for it"
        await rank.turn()
        assert rank.executor.degraded == ""
        rank.executor.post(StepPlan(stores=(store(3, [1], [0]),)))
        assert not (await rank.turn()).report.results[3].failed


async def test_answers_of_the_model_runner_thread_do_not_show_that_the_loop_runs(
    clock: Clock,
) -> None:
    """While the loop is blocked, the model-runner thread keeps refusing loads by itself."""
    async with rank_with() as rank:
        rank.executor.post(StepPlan(loads=(LoadJob(1, "r1", (MISSING_CHUNK,)),)))
        pass_deadlines(clock, rank)
        assert rank.executor.drain().failed == {"r1"}
        for job in range(2, 6):
            rank.executor.post(StepPlan(loads=(load(job, [0], [9]),)))
            assert rank.executor.drain().failed == {f"r{job}"}, "at once"


async def test_stores_continue_some_time_after_a_fault(clock: Clock) -> None:
    async with rank_with() as rank:
        write_through = WriteThroughJob(1, 7, 0, (KEYS[0],), (0,))  # there is no tier 7
        rank.executor.post(StepPlan(write_throughs=(write_through,)))
        assert (await rank.turn()).report.results[1].failed
        assert rank.executor.degraded
        rank.executor.post(StepPlan(stores=(store(2, [1], [0]),)))
        assert (await rank.turn()).report.results[2].failed
        clock.ahead_s += PAUSE_S
        await rank.turn()
        assert rank.executor.degraded == ""
        rank.executor.post(StepPlan(stores=(store(3, [1], [0]),)))
        assert not (await rank.turn()).report.results[3].failed


def fence_returns(executor: Executor, jobs: list[int]) -> bool:
    """True if a fence that might wait for an hour returns at once."""
    thread = threading.Thread(target=executor.fence, args=(jobs,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def missed(rank: Rank, jobs: list[int]) -> None:
    """A step has waited for these stores without success."""
    usual = rank.executor.limits
    rank.executor.limits = offload.worker.executor.ExecutorLimits(fence_timeout_s=0.01)
    rank.executor.fence(jobs)
    rank.executor.limits = usual


@pytest.mark.usefixtures("synchronous_compute")
async def test_a_poisoned_store_is_not_waited_for_again() -> None:
    async with rank_with(fence_timeout_s=3600.0) as rank:
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]), store(2, [2], [1]))))
        await asyncio.sleep(0)  # both are under way, and hang
        rank.executor.poison([1])
        assert await asyncio.to_thread(fence_returns, rank.executor, [1])
        assert rank.executor.stats.fence_timeouts == 0
        missed(rank, [2])
        assert rank.executor.stats.fence_timeouts == 1
        assert await asyncio.to_thread(fence_returns, rank.executor, [1, 2])
        assert rank.executor.stats.fence_timeouts == 1
        results = (await rank.turn()).report.results
        assert results[1].failed
        assert results[2].failed


async def test_a_store_that_does_not_begin_is_not_waited_for(clock: Clock) -> None:
    """The loop has rejected it, and the step that fences it comes before its answer is
    processed."""
    async with rank_with(fence_timeout_s=3600.0) as rank:
        broken = WriteThroughJob(2, 7, 0, (KEYS[0],), (0,))  # there is no tier 7
        unread: Any = StepPlan(deletes=7, stores=(store(1, [1], [0]),))
        rank.executor.post(unread)
        rank.executor.post(StepPlan(write_throughs=(broken,)))
        rank.executor.post(StepPlan(stores=(store(3, [2], [1]),)))
        for _ in range(20):
            rank.engine.run_all()
            await asyncio.sleep(0)
        assert rank.executor.degraded
        assert await asyncio.to_thread(fence_returns, rank.executor, [1, 3])
        assert rank.executor.stats.fence_timeouts == 0
        results = (await rank.turn()).report.results
        assert all(results[job].failed for job in (1, 2, 3))


@pytest.mark.usefixtures("synchronous_compute")
async def test_a_hanging_copy_costs_one_wait_however_many_stores_queue_behind_it() -> None:
    async with rank_with(fence_timeout_s=3600.0) as rank:
        stores = tuple(store(job, [job], [job]) for job in range(1, 6))
        rank.executor.post(StepPlan(stores=stores))
        await asyncio.sleep(0)
        missed(rank, [1])
        for job in range(2, 6):
            assert await asyncio.to_thread(fence_returns, rank.executor, [job])
        results = (await rank.turn()).report.results
        assert all(result.failed for result in results.values())
        assert len(results) == 5
        rank.executor.post(StepPlan(stores=(store(6, [BLOCKS - 1], [1]),)))
        waiting = threading.Thread(target=rank.executor.fence, args=([6],), daemon=True)
        waiting.start()
        assert not (await rank.turn(200)).report.results[6].failed, "fences must wait as before"
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()

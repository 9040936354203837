"""The executor's guarantees to its caller: it answers every job once, and observes fences and
deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from offload.layout.registration import GroupCaches, Registration, register_kv_caches
from offload.messages.plan import (
    IN_SLAB,
    STAGED,
    LoadItem,
    LoadJob,
    StepPlan,
    StoreJob,
    WriteThroughJob,
)
from offload.worker.block_verifier import Verifier
from offload.worker.executor import Executor
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.fences import Reading
from offload.worker.rank_memory import RankMemory
from offload.worker.staging import Staging
from offload.worker.unanswered_jobs import Drained
from tests.offload.small_model import BLOCKS, compute, keys, kv_caches, wrong_blocks
from tests.patience import PATIENCE_S
from tests.sim.virtual_time import run_virtually
from tests.threads import no_thread_is_left
from tiers.base import Tier
from tiers.slab.slab import HostSlab
from tiers.testing.faults import FailingTier, HoldingTier, nth
from tiers.testing.memory_tier import MemoryTier
from tiers.testing.simulated_copy import SimulatedCopyEngine

SLOTS = 8
KEYS = [key + bytes(4) for key in keys(8)]


class Rank:
    """An executor on simulated streams that advance only on command."""

    def __init__(
        self,
        tier: Tier,
        staging: int = 1,
        verifier: Callable[[Registration], Verifier] | None = None,
        **limits: float,
    ) -> None:
        self.caches = kv_caches()
        layers = {name: self.caches[name] for name in ("layers.0", "layers.1")}
        registration = register_kv_caches(BLOCKS, [GroupCaches(0, 1, layers)])
        self.slab = HostSlab(8192, SLOTS)
        self.engine = SimulatedCopyEngine(
            registration.groups, self.slab, num_blocks=BLOCKS, seed=1, automatic=False
        )
        self.verifier = None if verifier is None else verifier(registration)
        self.executor = Executor(
            RankMemory(
                self.slab,
                self.engine,
                {group.group: group for group in registration.groups},
                range(SLOTS - staging, SLOTS),
            ),
            [tier],
            limits=ExecutorLimits(**limits),  # type: ignore[arg-type]  # only the float fields
            verifier=self.verifier,
        )

    async def plans_are_taken(self) -> None:
        """Let the loop accept the posted plans and start their tasks, but copy nothing."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def turn(self, times: int = 20) -> Drained:
        """Let the loop and the streams run, and return what has ended."""
        total = Drained()
        for _ in range(times):
            self.engine.run_all()
            await asyncio.sleep(0)
            self.add(total, self.executor.drain())
        return total

    @staticmethod
    def add(total: Drained, more: Drained) -> None:
        assert not total.report.results.keys() & more.report.results.keys(), "answered twice"
        assert not total.finished & more.finished, "request ended twice"
        total.finished |= more.finished
        total.failed |= more.failed
        total.report.results.update(more.report.results)


@asynccontextmanager
async def rank_with(tier: Tier | None = None, **limits: Any) -> AsyncIterator[Rank]:
    tier = tier or MemoryTier(1 << 20)
    await tier.open()
    rank = Rank(tier, **limits)
    rank.executor.start()
    try:
        yield rank
    finally:
        await rank.executor.aclose(0.5)
        rank.slab.close()


async def fill(rank: Rank, tier: Tier, count: int) -> None:
    """Store the first chunks in the tier."""
    compute(rank.caches, keys(count), range(count))
    for n in range(count):
        rank.executor.post(StepPlan(stores=(store(100 + n, [n], [0]),)))
        await rank.turn()
        await tier.write([KEYS[n]], [rank.slab.slot_view(0, 8192)])


def store(job: int, blocks: list[int], slots: list[int]) -> StoreJob:
    return StoreJob(job, 0, blocks, slots)


def load(job: int, slots: list[int], blocks: list[int], tier: int = IN_SLAB) -> LoadJob:
    items = tuple(
        LoadItem(KEYS[n], 0, (block,), slot, tier)
        for n, (slot, block) in enumerate(zip(slots, blocks, strict=True))
    )
    return LoadJob(job, f"r{job}", items)


async def test_store_write_load_each_answered_once() -> None:
    async with rank_with() as rank:
        compute(rank.caches, keys(3), [1, 2, 3])
        rank.executor.post(StepPlan(stores=(store(1, [1, 2, 3], [0, 1, 2]),)))
        done = await rank.turn()
        assert done.report.results.keys() == {1}
        write_through = WriteThroughJob(2, 0, 0, tuple(KEYS[:3]), (0, 1, 2))
        rank.executor.post(StepPlan(write_throughs=(write_through,)))
        assert (await rank.turn()).report.results[2].bad == frozenset()
        rank.slab.slot(0)[:] = 0
        rank.executor.post(StepPlan(loads=(load(3, [4, STAGED, STAGED], [10, 11, 12], tier=0),)))
        done = await rank.turn()
        assert done.finished == {"r3"}
        assert not done.failed
        assert wrong_blocks(rank.caches, keys(3), [10, 11, 12]) == []


@pytest.mark.usefixtures("synchronous_compute")
async def test_a_fence_returns_after_the_store_has_read_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rank_with(fence_timeout_s=PATIENCE_S) as rank:
        compute(rank.caches, keys(1), [1])
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
        waits = threading.Event()
        end = Reading.end

        def wait(reading: Reading, timeout: float) -> object:
            waits.set()
            return end(reading, timeout)

        monkeypatch.setattr(Reading, "end", wait)
        fence = asyncio.create_task(asyncio.to_thread(rank.executor.fence, [1]))
        while not waits.is_set() and not fence.done():  # noqa: ASYNC110  # set by a thread
            await asyncio.sleep(0.001)
        assert waits.is_set(), "the copy has not run yet"
        assert not fence.done(), "the copy has not run yet"
        done = await rank.turn()
        await fence
        assert rank.executor.stats.fence_timeouts == 0
        compute(rank.caches, keys(1, 5), [1])  # the block has a new owner
        assert not done.report.results[1].failed
        rank.executor.post(StepPlan(loads=(load(2, [0], [9]),)))
        await rank.turn()
        assert wrong_blocks(rank.caches, keys(1), [9]) == []


@pytest.mark.usefixtures("synchronous_compute")
async def test_a_fence_that_cannot_wait_fails_the_store() -> None:
    async with rank_with(fence_timeout_s=0.05) as rank:
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
        await rank.plans_are_taken()
        await asyncio.to_thread(rank.executor.fence, [1])
        assert rank.executor.stats.fence_timeouts == 1
        assert (await rank.turn()).report.results[1].failed


async def test_a_fence_before_the_loop_has_accepted_the_store_cancels_it() -> None:
    async with rank_with(fence_timeout_s=0.05) as rank:
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
        # blocks the loop's own thread, so the plan has not been accepted yet
        rank.executor.fence([1])
        assert (await rank.turn()).report.results[1].failed


def test_a_hanging_read_ends_the_request_but_not_the_job() -> None:
    run_virtually(hang_and_give_up())


async def hang_and_give_up() -> None:
    tier = HoldingTier(MemoryTier(1 << 20), methods={"read"})
    async with rank_with(tier) as rank:
        rank.executor.post(StepPlan(loads=(load(1, [0], [9], tier=0),)))
        await tier.waiting()
        ended, clock = Drained(), asyncio.get_running_loop()
        late_s = clock.time() + rank.executor.limits.load_timeout_s + 0.1  # in virtual time
        while not ended.finished:
            assert clock.time() < late_s, "the request still waits"
            Rank.add(ended, await rank.turn(1))
            await asyncio.sleep(0.01)
        assert ended.failed == {"r1"}
        assert ended.report.results == {}, "the read may still write into the slot"
        rank.caches["layers.0"][9] = 7
        tier.release()
        done = await rank.turn()
        assert done.report.results[1].failed
        assert done.finished == set()
        assert bool((rank.caches["layers.0"][9] == 7).all()), "nothing may be copied after that"


async def test_a_joined_load_fails_with_the_read_it_joined() -> None:
    async with rank_with() as rank:  # the tier holds nothing
        first, second = load(1, [0], [9], tier=0), load(2, [0], [10])
        rank.executor.post(StepPlan(loads=(first, second)))
        done = await rank.turn()
        assert done.failed == {"r1", "r2"}
        assert done.report.results[1].lost == {KEYS[0]}
        assert done.report.results[2].bad == {KEYS[0]}


async def test_a_failed_read_loses_no_record() -> None:
    """The load fails, but the record stays known: a later load may find it."""
    memory = MemoryTier(1 << 20)
    tier = FailingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier) as rank:
        await fill(rank, memory, 1)
        rank.executor.post(StepPlan(loads=(load(1, [3], [9], tier=0),)))
        done = await rank.turn()
        assert (tier.met, done.failed) == (1, {"r1"})
        result = done.report.results[1]
        assert (result.bad, result.lost) == ({KEYS[0]}, frozenset())


async def test_a_store_reuses_the_slot_of_a_failed_read() -> None:
    """The failure of the read says nothing about the content that the store writes to the slot."""
    async with rank_with() as rank:  # the tier holds nothing
        rank.executor.post(StepPlan(loads=(load(1, [0], [9], tier=0),)))
        assert (await rank.turn()).failed == {"r1"}
        compute(rank.caches, keys(1), [1])
        rank.executor.post(StepPlan(stores=(store(2, [1], [0]),)))
        await rank.turn()
        rank.executor.post(StepPlan(loads=(load(3, [0], [10]),)))
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r3"}, set())
        assert wrong_blocks(rank.caches, keys(1), [10]) == []


async def test_a_reset_fails_loads_under_way_and_old_writes_stay_old() -> None:
    inner = MemoryTier(1 << 20)
    tier = HoldingTier(inner, methods={"read"})
    async with rank_with(tier) as rank:
        rank.executor.post(StepPlan(write_throughs=(WriteThroughJob(1, 0, 0, (KEYS[0],), (0,)),)))
        rank.executor.post(StepPlan(loads=(load(2, [1], [9], tier=0),)))
        await tier.waiting()
        rank.executor.post(StepPlan(cancel_loads=True, epochs={0: 5}))
        tier.release()
        done = await rank.turn()
        assert done.failed == {"r2"}
        await rank.executor.settle()
        assert inner.epoch == 5
        assert inner.records == {}


async def test_rejected_copies_fail_and_the_rest_of_the_plan_is_carried_out() -> None:
    inner = MemoryTier(1 << 20)
    async with rank_with(inner) as rank:
        compute(rank.caches, keys(2), [1, 2])
        rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
        await rank.turn()
        write_through = WriteThroughJob(3, 0, 0, (KEYS[0],), (0,))
        plan = StepPlan(
            stores=(store(2, [2], [1]),),
            write_throughs=(write_through,),
            loads=(load(4, [0], [9]),),
        )
        rank.executor.post(plan, refused="for a reason")
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r4"}, {"r4"})
        results = done.report.results
        assert {job for job, result in results.items() if result.failed} == {2, 4}
        assert inner.records.keys() == {KEYS[0]}
        assert (rank.caches["layers.0"][9] == 0).all()
        rank.executor.post(StepPlan(loads=(load(5, [0], [9]),)))
        assert (await rank.turn()).failed == set()
        assert wrong_blocks(rank.caches, keys(1), [9]) == []


async def test_a_plan_that_cannot_be_carried_out_is_answered_as_failed() -> None:
    async with rank_with() as rank:
        broken: Any = StepPlan(
            stores=(store(1, [1], [0]),),
            write_throughs=(WriteThroughJob(2, 7, 0, (KEYS[0],), (0,)),),  # there is no tier 7
            loads=(load(3, [0], [9]),),
        )
        rank.executor.post(broken)
        done = await rank.turn()
        assert done.report.results.keys() == {1, 2, 3}
        assert done.report.results[2].failed
        assert done.failed == {"r3"}
        assert rank.executor.degraded


async def test_a_store_of_an_unknown_group_leaves_no_job_unanswered() -> None:
    """An engine finds out only after it has accepted the copy."""
    async with rank_with() as rank:
        unknown = StoreJob(1, 7, [1], [0])
        plan = StepPlan(stores=(unknown, store(2, [2], [1])), loads=(load(3, [0], [9]),))
        rank.executor.post(plan)
        done = await rank.turn()
        assert done.report.results.keys() == {1, 2, 3}
        assert done.report.results[1].failed
        assert done.finished == {"r3"}
        assert not rank.executor.copy_pause.is_copying, "a fence would wait for the store"


async def test_an_impossible_copy_is_a_failed_job() -> None:
    async with rank_with() as rank:
        rank.executor.post(StepPlan(stores=(store(1, [BLOCKS + 5], [0]),)))
        rank.executor.post(StepPlan(loads=(load(2, [0], [BLOCKS + 5]),)))
        done = await rank.turn()
        assert done.report.results[1].failed
        assert done.report.results[2].failed
        assert done.failed == {"r2"}


async def test_copies_that_keep_failing_do_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rank_with() as rank:
        for job in range(12):
            rank.executor.post(StepPlan(stores=(store(job, [BLOCKS + 5], [0]),)))
            rank.executor.post(StepPlan(loads=(load(100 + job, [0], [BLOCKS + 5]),)))
            done = await rank.turn()
            assert done.report.results[job].failed
            assert done.report.results[100 + job].failed
    lines = sorted(record.getMessage().partition(":")[2][:16] for record in caplog.records)
    assert lines == [" 1 loads were no", " 1 stores have f", " 10 loads were n", " 10 stores have "]


async def test_closing_leaves_no_thread() -> None:
    with no_thread_is_left():
        async with rank_with() as rank:
            rank.executor.post(StepPlan(stores=(store(1, [1], [0]),)))
            await rank.turn()


def test_a_plan_posted_to_a_stopped_loop_is_answered() -> None:
    async def opened() -> Rank:
        tier = MemoryTier(1 << 20)
        await tier.open()
        rank = Rank(tier)
        rank.executor.start()
        return rank

    rank = asyncio.run(opened())
    rank.executor.post(StepPlan(loads=(load(1, [0], [9]),)))
    ended = rank.executor.drain()
    assert ended.failed == {"r1"}
    assert ended.report.results[1].failed
    rank.slab.close()


@pytest.mark.parametrize("slots", [1, 2, 8])
async def test_a_tier_that_hangs_keeps_its_own_staging_window(slots: int) -> None:
    """Neither the other tier nor the probe that tests the hanging tier waits for it."""
    staging = Staging(range(slots), 2)
    first, second = (staging.window(tier, probe=False) for tier in range(2))
    assert staging.free == slots
    taken = await first.take(first.size)
    if slots > 1:
        assert await asyncio.wait_for(second.take(second.size), PATIENCE_S)
    if slots == 8:
        probe = staging.window(0, probe=True)
        assert await asyncio.wait_for(probe.take(probe.size), PATIENCE_S)
        assert first.size + probe.size == 4
    first.give(taken)
    assert first.free == first.size


def test_reads_that_never_return_do_not_block_the_probe() -> None:
    """The disk works again, but reads that it has lost still hold all semaphores and staging slots
    of loads."""
    run_virtually(lose_reads_and_probe())


async def lose_reads_and_probe() -> None:
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier, reads_in_flight=1, staging=6) as rank:
        await fill(rank, memory, 4)
        for job in (1, 2):
            rank.executor.post(StepPlan(loads=(load(job, [STAGED] * 4, [9, 10, 11, 12], 0),)))
        await asyncio.sleep(2 * rank.executor.limits.load_timeout_s)
        assert (await rank.turn()).failed == {"r1", "r2"}
        items = tuple(LoadItem(key, 0, (), STAGED, 0) for key in KEYS[:4])
        rank.executor.post(StepPlan(loads=(LoadJob(3, "", items),)))
        done = await rank.turn(200)
        assert not done.report.results[3].bad
        tier.release()

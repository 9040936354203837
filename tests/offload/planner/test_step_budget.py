"""The work of a step is bounded, and deferred work does not pile up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_of
from offload.messages.plan import StepPlan
from offload.messages.report import JobResult, StepReport
from offload.planner import step_budget
from offload.planner import stores as store_planner
from offload.planner.jobs import Job
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.step_budget import StepBudget
from offload.planner.stores import StorePlanner
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import WriteThroughQueue
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

STEP_CHUNKS = 400
UNITS = 1200
SIZE = 100


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big") + (0).to_bytes(4, "big")


JUNK = [key_of(10**9 + n) for n in range(4000)]


class Bed:
    """A planner whose requests compute ``per_step`` new chunks in every step; ranks answer in the
    next one."""

    def __init__(
        self,
        tiers: int,
        slots: int = 4000,
        disk_chunks: int = 100_000,
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        self.cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        self.lower = [
            TierIndex(f"disk{n}", ByteCapacity(disk_chunks * SIZE), LruPolicy())
            for n in range(tiers)
        ]
        groups = {0: GroupInfo("full", 16, (SIZE,) * tiers)}
        self.planner = Planner(
            groups,
            self.cpu,
            self.lower,
            PlannerSettings(WorkLimits(step_chunks=step_chunks)),
        )
        self.now = self.step_s = 0.0
        self.computed = self.stored = 0
        self.spent_most = 0
        self.behind_most = 0

    def step(self, chunks: int, length: int = 100, *, loading: bool = False) -> StepPlan:
        """Requests of ``length`` chunks each. ``loading``: loads continue meanwhile and use half of
        the budget."""
        self.now += self.step_s
        self.planner.tick(self.now)
        numbers = range(self.computed, self.computed + chunks)
        self.computed += chunks
        for first in range(0, chunks, length):
            some = numbers[first : first + length]
            depths = range(16, 16 * (len(some) + 1), 16)
            run = ChunkBatch([key_of(n) for n in some], 0, list(some), depths)
            self.planner.stores.plan(run)
        spend = self.planner.budget
        plan = self._watched(spend)
        if loading:
            spend.end_step(0.0, half=True)
        self.stored += sum(len(store.slots) for store in plan.stores)
        jobs = [*plan.stores, *plan.write_throughs]
        self.planner.complete(StepReport({job.job: JobResult() for job in jobs}))
        behind = sum(cost for cost, _ in self.planner.deferred.pieces)
        self.behind_most = max(self.behind_most, behind)
        return plan

    def _watched(self, budget: StepBudget) -> StepPlan:
        """Run a step; return its plan and its cost when the next step begins."""
        ends = budget.end_step

        def end_step(now: float, *, half: bool) -> None:
            self.spent_most = max(self.spent_most, budget.units - budget.left)
            ends(now, half=half)

        budget.end_step = end_step  # type: ignore[method-assign]  # for this step
        try:
            return self.planner.step()
        finally:
            budget.end_step = ends  # type: ignore[method-assign]  # as it was

    def use(self, numbers: range) -> None:
        self.planner.uses.ended([key_of(n) for n in numbers])


def overload(tiers: int, slots: int = 40_000, length: int = 100, *, loading: bool = False) -> Bed:
    """Offer many times as much as can be stored, for a long time."""
    bed = Bed(tiers, slots=slots)
    for number in range(60):
        bed.step(1500, length, loading=loading)
        if number % 4 == 0:
            bed.use(range(bed.computed - 1500, bed.computed))
    assert bed.behind_most <= 3 * UNITS, "unprocessed answers pile up"
    assert bed.spent_most <= 1.5 * UNITS, "a step takes too long"
    assert bed.stored >= 60 * 60, "hardly anything is stored"
    return bed


@pytest.mark.parametrize("tiers", [0, 1, 2])
def test_excess_stores_are_skipped_and_nothing_piles_up(tiers: int) -> None:
    bed = overload(tiers)
    for _ in range(400):
        if not bed.planner.busy:
            break
        bed.step(0)
    assert not bed.planner.busy
    bed.planner.check()


@pytest.mark.parametrize("tiers", [0, 1, 2])
@pytest.mark.parametrize("length", [4, 64])
def test_short_requests_do_not_pile_up_either(tiers: int, length: int) -> None:
    overload(tiers, length=length)
    overload(tiers, length=length, loading=True)


@pytest.mark.parametrize("tiers", [1, 2])
def test_everything_within_the_budget_is_written_through(tiers: int) -> None:
    """Chunks enter a full CPU tier, and each is written onward: nothing is skipped, however long
    this continues."""
    bed = Bed(tiers)
    bed.cpu.recover(JUNK, [EntryInfo()] * len(JUNK))
    per_step = 100 if tiers == 1 else 60
    for _ in range(150):
        bed.step(per_step)
        bed.use(range(bed.computed - per_step, bed.computed))
    assert bed.stored == bed.computed == 150 * per_step
    for _ in range(20):
        bed.step(0)
    assert not bed.planner.busy
    assert all(key_of(n) in index for index in bed.lower for n in range(bed.computed))
    assert not any(queue.skipped for queue in bed.planner.write_through.queues)
    bed.planner.check()


def test_prefills_of_8192_tokens_are_stored_completely_if_steps_are_long() -> None:
    """Each step of 0.2 s stores 512 chunks into a full CPU tier and writes them through; short
    steps store fewer."""
    stored = {}
    for step_s in (0.02, 0.2):
        bed = Bed(1, slots=20_000, step_chunks=step_budget.STEP_CHUNKS)
        junk = [key_of(10**9 + n) for n in range(20_000)]
        bed.cpu.recover(junk, [EntryInfo()] * len(junk))
        bed.step_s = step_s
        for _ in range(8):
            bed.step(0)
        for _ in range(60):
            bed.step(512)
            bed.use(range(bed.computed - 512, bed.computed))
        stored[step_s] = bed.stored / bed.computed
        assert not any(queue.skipped for queue in bed.planner.write_through.queues)
    assert stored[0.2] == 1.0
    assert stored[0.02] < 0.5


def test_the_head_of_a_long_request_is_evicted_last_from_every_tier() -> None:
    bed = Bed(1, slots=2000)
    bed.step(700)
    while bed.planner.busy:
        bed.step(0)
    bed.use(range(700))
    while bed.planner.busy:
        bed.step(0)
    tail_first = [key_of(n) for n in reversed(range(700))]
    for index in (bed.cpu, *bed.lower):
        held = [key for key in tail_first if key in index]
        assert len(held) >= 400
        assert index.policy.victims(700, lambda key: True) == held


def some_fail() -> None:
    """Several write-throughs are processed together, and some of them fail."""
    bed = Bed(1)
    bed.step(200)
    plan = bed.planner.step()
    assert len(plan.write_throughs) >= 3
    first, second, third = plan.write_throughs[:3]
    bad = frozenset(second.keys[3:5])
    report = {job.job: JobResult() for job in plan.write_throughs}
    report |= {second.job: JobResult(bad=bad), third.job: JobResult(failed=True)}
    bed.planner.complete(StepReport(report))
    deleted = list(bed.planner.step().deletes.get(0, ()))
    index = bed.lower[0]
    assert all(key in index for key in first.keys)
    assert {key for key in second.keys if key not in index} == bad
    assert not any(key in index for key in third.keys)
    assert set(deleted) == {*bad, *third.keys}
    assert not any(map(bed.cpu.is_in_use, [*first.keys, *second.keys, *third.keys]))
    assert {group_of(key) for key in deleted} == {0}
    bed.planner.check()


def test_failed_write_throughs_do_not_affect_others_of_the_step() -> None:
    some_fail()


def test_chunks_evicted_for_one_that_still_does_not_fit_are_deleted() -> None:
    """Chunks are evicted for a large chunk, which finds too little space all the same."""
    cpu = TierIndex("cpu", SlotCapacity(100), LruPolicy())
    disk = TierIndex("disk", ByteCapacity(10 * SIZE), LruPolicy())
    large = 1
    groups = {0: GroupInfo("full", 16, (SIZE,)), large: GroupInfo("window", 16, (9 * SIZE,))}
    planner = Planner(groups, cpu, [disk])
    deleted: list[bytes] = []

    def finish() -> None:
        while planner.busy:
            plan = planner.step()
            deleted.extend(plan.deletes.get(0, ()))
            jobs = [*plan.stores, *plan.write_throughs]
            planner.complete(StepReport({job.job: JobResult() for job in jobs}))

    small = [key_of(n) for n in range(10)]
    planner.stores.plan(ChunkBatch(small, 0, list(range(10)), range(16, 176, 16)))
    finish()
    disk.pin(small[:5])
    key = small[0][:32] + large.to_bytes(4, "big")
    planner.stores.plan(ChunkBatch([key], large, [99], [16]))
    finish()
    assert key not in disk
    assert set(deleted) == {key for key in small if key not in disk} == set(small[5:])


def test_chunks_without_space_in_a_tier_are_skipped_step_by_step() -> None:
    """Thousands of chunks wait for a tier in which no chunk can be evicted."""
    bed = Bed(1, disk_chunks=50)
    (disk,), (queue,) = bed.lower, bed.planner.write_through.queues
    disk.recover(JUNK[:50], [EntryInfo(size_bytes=SIZE)] * 50)
    disk.pin(JUNK[:50])
    infos = [EntryInfo()] * len(JUNK[50:])
    bed.cpu.recover(JUNK[50:], infos)
    queue.offer(JUNK[50:], infos)
    waiting = len(queue)
    while waiting:
        bed.step(0)
        assert 0 < waiting - len(queue) <= UNITS
        waiting = len(queue)
    assert queue.skipped == len(JUNK[50:])
    bed.planner.check()


@pytest.mark.parametrize(
    ("steps_s", "times"),
    [
        ([0.01] * 9, 1),
        ([0.049] * 9, 1),
        ([0.051] * 9, 2),
        ([9.0] * 9, 8),
        ([0.4] * 3, 1),  # not known yet
        ([0.01] * 5 + [60.0] * 3, 1),  # the server was idle
        ([9.0] * 9 + [0.01], 1),
        ([-1.0] * 9, 1),
    ],
)
def test_consecutive_long_steps_may_do_more(steps_s: list[float], times: int) -> None:
    budget = StepBudget(STEP_CHUNKS)
    now = 0.0
    for took in [0.0, *steps_s]:
        now += took
        budget.end_step(now)
    assert budget.times == times
    assert budget.left == times * UNITS
    assert budget.above(1 / 4) == times * UNITS * 3 // 4, "other requests must get their share"
    budget.end_step(now + steps_s[-1], half=True)
    assert budget.left == budget.times * UNITS // 2


def done_in(step_s: float, steps: int = 60) -> tuple[int, int]:
    """Numbers of chunks that are stored, and planned to be loaded, in this many steps of this
    length."""
    bed = Bed(1, slots=100_000)
    bed.step_s = step_s
    for _ in range(steps):
        bed.step(1500)
    stored, bed = bed.stored, Bed(1, slots=8000)
    bed.step_s = step_s
    bed.cpu.recover(JUNK, [EntryInfo()] * len(JUNK))
    depths = range(16, 16 * (len(JUNK) + 1), 16)
    for _ in range(6):
        bed.step(0)
    bed.planner.loads.plan("r", [ChunkBatch(JUNK, 0, list(range(len(JUNK))), depths)])
    parts = [part for _ in range(4) for part in bed.step(0).loads]
    return stored, sum(len(part.items) for part in parts)


def test_long_steps_store_and_load_more() -> None:
    (stored, loaded), (stored_more, loaded_more) = done_in(0.01), done_in(0.5)
    assert stored_more > 3 * stored
    assert loaded_more > 2 * loaded > 0


def _stores_leave_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_planner, "LEFT_BY_STORES_SHARE", 0.0)


def _no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBudget, "above", lambda self, share: self.units)


def _all_are_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "verdict", lambda job: (list(job.fills), []))


def _few_of_each(patch: pytest.MonkeyPatch) -> None:
    plan = StorePlanner.plan

    def generous(self: StorePlanner, *args: Any, ended: bool = False) -> int:
        return plan(self, *args, ended=True)

    patch.setattr(StorePlanner, "plan", generous)


def _no_least_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_budget, "OVERDUE_SHARE", 0.0)


def _pins_stay(patch: pytest.MonkeyPatch) -> None:
    ended = WriteThroughQueue.ended

    def forgetful(self: WriteThroughQueue, jobs: list[Job], now: float) -> object:
        for job in jobs:
            job.pins = ()
        return ended(self, jobs, now)

    patch.setattr(WriteThroughQueue, "ended", forgetful)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (_stores_leave_nothing, lambda: overload(2)),
        (_no_end, lambda: overload(1)),
        (_few_of_each, lambda: overload(2, length=64, loading=True)),
        (_no_least_share, lambda: overload(2, loading=True)),
        (_all_are_good, some_fail),
        (_pins_stay, some_fail),
    ],
)
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test()

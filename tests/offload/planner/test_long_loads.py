"""Loads and answers with more chunks than one step handles: nothing is lost between two steps, and
nothing is left over when another event intervenes."""

from __future__ import annotations

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.messages.plan import IN_SLAB, LoadJob, StepPlan
from offload.messages.report import JobResult, Observed, StepReport
from offload.planner.loads import MISSING_CHUNK, LoadHolds
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.work_limits import WorkLimits
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import GROUP, key_of

LONG = range(10)
OTHERS = range(100, 120)


class Bed:
    """A planner that plans four chunks of loads per step, fewer if they need slots."""

    def __init__(self, slots: int = 24, disk_chunks: int = 24, ranks: int = 1) -> None:
        self.cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        self.disk = TierIndex("disk", ByteCapacity(disk_chunks * 100), LruPolicy())
        groups = {GROUP: GroupInfo("full", 16, (100,))}
        self.planner = Planner(
            groups, self.cpu, [self.disk], PlannerSettings(WorkLimits(step_chunks=4), ranks=ranks)
        )
        self.planner.tick(0.0)

    def store(self, numbers: range) -> None:
        """Put these chunks into the CPU tier and onto the disk."""
        for n in numbers:
            self.planner.stores.plan(batch(range(n, n + 1)))
            self.work()

    def work(self) -> None:
        """Let every store and write succeed, until no work is left."""
        while self.planner.busy:
            self.answer_all(self.step())

    def answer_all(self, plan: StepPlan) -> None:
        jobs = [job.job for job in (*plan.stores, *plan.write_throughs)]
        jobs += [load.job for load in plan.loads if load.is_last]
        self.planner.complete(StepReport({job: JobResult() for job in jobs}))

    def step(self) -> StepPlan:
        plan = self.planner.step()
        self.planner.check()
        return plan

    def load(self, request: str = "r", numbers: range = LONG) -> LoadJob:
        """The first part of a load."""
        self.planner.loads.plan(request, [batch(numbers)])
        (first,) = self.step().loads
        assert not first.is_last
        return first

    def parts(self) -> list[LoadJob]:
        """The remaining parts, step by step."""
        found: list[LoadJob] = []
        while not (found and found[-1].is_last):
            found += self.step().loads
        return found

    def end(self, job: int, result: JobResult | None = None) -> None:
        """End a load; nothing may be left of it."""
        self.planner.complete(StepReport({job: result or JobResult()}))
        self.planner.loads.request_ended("r")
        self.work()
        assert self.planner.loads.loading == 0
        loads = self.planner.loads
        for left in (loads.held, self.planner.sources.promoting, loads.queue, loads._waited_for):
            assert not left
        for index in (self.cpu, self.disk):
            assert not index._pins
            assert not index.filling_count


def batch(numbers: range) -> ChunkBatch:
    return ChunkBatch(
        [key_of(n) for n in numbers], GROUP, list(numbers), [16 * (n + 1) for n in numbers]
    )


def keys_in(parts: list[LoadJob]) -> list[bytes]:
    return [item.key for part in parts for item in part.items]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_long_load_is_one_job_in_parts(where: str) -> None:
    bed = Bed()
    bed.store(LONG)
    if where == "disk":
        bed.cpu.clear()
    tokens = bed.planner.loads.plan("r", [batch(LONG)])
    assert tokens.by_tier == {-1 if where == "cpu" else 0: 160}
    parts = bed.parts()
    assert keys_in(parts) == [key_of(n) for n in LONG]
    assert {part.job for part in parts} == {parts[0].job}
    assert [part.part for part in parts] == list(range(len(parts)))
    assert len(parts) >= 3
    assert bed.planner.loads.loading == 10
    bed.end(parts[0].job)
    assert all(key_of(n) in bed.cpu for n in LONG)
    assert bed.planner.totals()["loads"] == 1
    assert bed.planner.totals()[f"loaded_tokens:{where}"] == 160


def test_the_estimate_of_a_long_load_is_replaced_not_modified() -> None:
    """A reader may keep the mapping, which describes the moment when it was read."""
    bed = Bed()
    bed.store(LONG)
    tokens = bed.planner.loads.plan("r", [batch(LONG)])
    estimate = tokens.by_tier
    bed.cpu.drop([key_of(n) for n in range(6, 10)])
    parts = bed.parts()
    assert estimate == {-1: 160}
    assert tokens.by_tier == {-1: 96, 0: 64}
    bed.end(parts[0].job)
    assert bed.planner.totals()["loaded_tokens:disk"] == 64


def test_a_load_of_no_chunks_is_a_load() -> None:
    bed = Bed()
    assert bed.planner.loads.plan("r", []).by_tier == {}
    (load,) = bed.step().loads
    assert (load.items, load.is_last) == ((), True)
    bed.end(load.job)


def test_a_key_may_occur_twice() -> None:
    """A caller of the in-process API may request that."""
    bed = Bed()
    bed.store(LONG)
    twice = [*LONG, 3, 4]
    keys = [key_of(n) for n in twice]
    bed.planner.loads.plan("r", [ChunkBatch(keys, GROUP, list(range(12)), range(1, 13))])
    parts = bed.parts()
    assert keys_in(parts) == keys
    bed.end(parts[0].job)


def test_one_step_plans_no_more_than_its_share_for_all_loads() -> None:
    bed = Bed()
    bed.store(LONG)
    for name in "abc":
        bed.planner.loads.plan(name, [batch(LONG)])
    while not all(load.rest == [] for load in bed.planner.loads._waited_for.values()):
        plan = bed.step()
        assert sum(len(part.items) for part in plan.loads) <= 4
    jobs = {part.job for part in bed.planner.step().loads}
    assert not jobs


def keeps_its_chunks(tier: str) -> None:
    """The chunks of a load are not evicted before its part is planned.

    The parts are planned although the tier overflows meanwhile.
    """
    bed = Bed(slots=24 if tier == "disk" else 14, disk_chunks=14)
    bed.store(LONG)
    if tier == "disk":
        bed.cpu.clear()
    first = bed.load()
    index = bed.cpu if tier == "cpu" else bed.disk
    allowance = bed.planner.budget.loads
    left, allowance.left = allowance.left, 0  # no part is planned meanwhile
    for n in OTHERS:
        one = batch(range(n, n + 1))
        infos = bed.planner.groups[GROUP].entries(one, 1 if tier == "cpu" else 100)
        granted = len(index.reserve([key_of(n)], infos).locations)
        index.commit([key_of(n)][:granted], infos[:granted])
    allowance.left = left
    assert index.evictions, "the tier must overflow"
    assert all(index.is_in_use(key_of(n)) for n in LONG)
    parts = [first, *bed.parts()]
    assert keys_in(parts) == [key_of(n) for n in LONG]
    bed.end(first.job)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_chunks_of_an_unplanned_part_are_not_evicted(tier: str) -> None:
    keeps_its_chunks(tier)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_without_protection_the_load_would_fail(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault."""
    monkeypatch.setattr(LoadHolds, "hold", lambda self, owner, keys: None)
    with pytest.raises(AssertionError):
        keeps_its_chunks(tier)


def test_two_loads_may_wait_for_the_same_chunks() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.planner.loads.plan("r", [batch(LONG)])
    bed.planner.loads.plan("other", [batch(LONG)])
    bed.planner.loads.cancel("other")
    held = bed.planner.loads.held
    assert len(held) == 1
    assert all(key_of(number) in held for number in LONG)
    parts = [part for _ in range(10) for part in bed.step().loads]
    (other,) = (part for part in parts if part.request == "other")
    assert (other.part, other.is_last, other.items) == (0, True, ())
    mine = [part for part in parts if part.request == "r"]
    assert keys_in(mine) == [key_of(n) for n in LONG]
    bed.planner.complete(StepReport({other.job: JobResult()}))
    bed.end(mine[0].job)


def test_an_answer_ends_only_its_own_load() -> None:
    """A request's name may be reused while an earlier load under this name is still in flight (a
    read that hangs)."""
    bed = Bed()
    bed.store(LONG)
    bed.planner.loads.plan("r", [batch(range(3))])
    (old,) = bed.step().loads
    bed.planner.loads.request_ended("r")
    assert bed.planner.loads.loading == 0
    new = bed.load("r")
    assert bed.planner.loads.loading == len(LONG)
    bed.planner.complete(StepReport({old.job: JobResult()}))
    assert bed.planner.loads.loading == len(LONG), "the new load has not ended"
    assert keys_in([new, *bed.parts()]) == [key_of(n) for n in LONG], (
        "the new load must not be shortened either"
    )
    bed.end(new.job)


def test_an_aborted_request_loads_no_more() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.cpu.clear()
    first = bed.load()
    bed.planner.loads.cancel("r")
    (last,) = bed.step().loads
    assert (last.job, last.part, last.is_last, last.items) == (first.job, 1, True, ())
    bed.end(first.job)
    assert all(item.key in bed.cpu for item in first.items), "chunks that were read must be kept"


def is_cut(bed: Bed, first: LoadJob) -> None:
    (last,) = bed.step().loads
    assert (last.job, last.is_last, last.items) == (first.job, True, (MISSING_CHUNK,))
    bed.end(first.job, JobResult(bad=frozenset({MISSING_CHUNK.key})))
    assert bed.planner.totals()["load_failures"] == 1


def test_a_reset_during_a_load_fails_it() -> None:
    bed = Bed()
    bed.store(LONG)
    first = bed.load()
    bed.planner.forget_all()
    bed.planner.begin_epochs({0: 2})
    is_cut(bed, first)
    assert not len(bed.cpu)


def test_a_tier_that_begins_to_fail_is_not_read_for_the_rest() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.cpu.clear()
    first = bed.load()
    failing = StepReport()
    failing.add_observed(0, 0, Observed(reads_failed=3))
    bed.planner.complete(failing)
    assert not bed.planner.health[0].reads.closed
    is_cut(bed, first)


def test_a_chunk_lost_during_a_load_fails_it() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.cpu.clear()
    first = bed.load()
    bed.planner.forget([key_of(9)])
    parts = bed.parts()
    assert parts[-1].items == (MISSING_CHUNK,)
    bed.end(first.job, JobResult(bad=frozenset({MISSING_CHUNK.key})))


def test_a_part_that_fails_fails_the_load_and_keeps_the_rest() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.cpu.clear()
    parts = [bed.load(), *bed.parts()]
    lost = frozenset({parts[1].items[0].key})
    bed.end(parts[0].job, JobResult(bad=lost, lost=lost))
    assert {key for key in map(key_of, LONG) if key not in bed.cpu} == lost
    assert not any(key in bed.disk for key in lost)


def test_a_load_that_every_rank_has_given_up_is_not_continued() -> None:
    bed = Bed(ranks=2)
    bed.planner = Planner(
        bed.planner.groups, bed.cpu, [bed.disk], PlannerSettings(WorkLimits(step_chunks=4))
    )
    bed.store(LONG)
    bed.cpu.clear()
    first = bed.load()
    bed.planner.complete(StepReport({first.job: JobResult(failed=True, late=True)}))
    bed.planner.loads.request_ended("r")
    (last,) = bed.step().loads
    assert last.is_last
    assert last.items == (MISSING_CHUNK,)
    assert not bed.step().loads
    bed.end(first.job)  # an answer without a job
    assert bed.planner.totals()["late_answers"] == 1


def test_answers_are_processed_over_several_steps_and_the_head_ends_up_youngest() -> None:
    bed = Bed()
    bed.store(LONG)
    bed.cpu.clear()
    parts = [bed.load(), *bed.parts()]
    bed.planner.complete(StepReport({parts[0].job: JobResult()}))
    assert 0 < bed.cpu.filling_count < 10
    assert bed.planner.busy
    held = bed.planner.sources.present
    for _ in range(20):
        assert all(map(held, map(key_of, LONG)))
        bed.step()
    assert bed.cpu.policy.victims(99, lambda key: True) == [key_of(n) for n in reversed(LONG)]
    bed.end(0)


def test_a_step_stores_no_more_than_its_share_and_the_rest_is_offered_again() -> None:
    many = range(300)
    cpu = TierIndex("cpu", SlotCapacity(400), LruPolicy())
    settings = PlannerSettings(WorkLimits(step_chunks=53))
    planner = Planner({GROUP: GroupInfo("full", 16, ())}, cpu, (), settings)
    assert planner.stores.plan(batch(many)) == 100, "five eighths of the budget"
    assert planner.stores.plan(batch(range(100, 300))) == 0
    assert planner.stores.plan(batch(range(290, 300))) == 0, (
        "not even a few may be stored while the request continues"
    )
    ended = batch(range(290, 300))
    assert planner.stores.plan(ended, ended=True) == 10, (
        "a few chunks of a request that ends are always stored"
    )
    assert planner.totals()["store_refusals"] == 0
    plan = planner.step()
    assert planner.stores.plan(batch(range(100, 300))) == 100
    assert sum(len(store.slots) for store in plan.stores) == 110
    ended = batch(range(200, 300))
    assert planner.stores.plan(ended, ended=True) == 64, "and no more, even if many are missing"


def test_a_part_in_the_slab_names_the_slots_that_contain_it() -> None:
    bed = Bed()
    bed.store(LONG)
    parts = [bed.load(), *bed.parts()]
    for part in parts:
        for item in part.items:
            assert (item.tier, item.slot) == (IN_SLAB, bed.cpu.location(item.key))
    bed.end(parts[0].job)

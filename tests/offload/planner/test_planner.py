"""The planner in a seeded world (``simulated_ranks``), and its individual decisions."""

from __future__ import annotations

import pytest

from offload.index import tier_index as index
from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import IN_SLAB, STAGED
from offload.messages.report import JobResult, StepReport
from offload.planner.jobs import Job
from offload.planner.late_stores import LateStores
from offload.planner.loads import MISSING_CHUNK
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.stores import StorePlanner
from offload.planner.work_limits import WorkLimits
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import GROUP, PlannerWithRanks, key_of

SEEDS = 150
STEPS = 250


def live(world: PlannerWithRanks) -> None:
    """Random actions: stores and loads of overlapping prefixes, resets, work and reports."""
    choose = world.random
    for _ in range(STEPS):
        start = choose.choice((0, 0, 20, 40))
        numbers = list(range(start, start + choose.randint(1, 9)))
        action = choose.random()
        if action < 0.2:
            world.store(numbers, choose.randint(1, 20), late=choose.random() < 0.3)
        elif action < 0.4:
            world.load(numbers, choose.randint(30, 50))
        elif action < 0.41:
            world.reset()
        elif action < 0.8:
            world.work()
        else:
            world.report()
        world.planner.check()


@pytest.mark.parametrize(("ranks", "many"), [(1, 64), (1, 1), (2, 64), (3, 1)])
def test_no_load_ever_restores_other_content(
    ranks: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "BULK_KEYS_MIN", many)
    loaded = 0
    for seed in range(SEEDS // 3):
        world = PlannerWithRanks(seed, ranks=ranks)
        live(world)
        world.drain()
        world.planner.check()
        assert world.mismatches == [], f"seed {seed}"
        assert world.planner.cpu.filling_count == 0, f"seed {seed}"
        assert all(not tier.filling_count for tier in world.planner.lower), f"seed {seed}"
        for number in range(60):
            key = key_of(number)
            for tier in (world.planner.cpu, *world.planner.lower):
                assert tier.state(key).value in ("absent", "resident"), f"seed {seed}"
        loaded += world.loaded
    assert loaded > 100, "the simulation must load something"


@pytest.mark.parametrize(
    "fault",
    ["no fence", "late blocks", "ignore failed ranks", "forget pins", "commit bad keys"],
)
def test_the_world_detects_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "no fence":
        monkeypatch.setattr(StorePlanner, "fence", lambda self, blocks: None)
    elif fault == "late blocks":
        monkeypatch.setattr(LateStores, "overwritten", lambda self, blocks: None)
    elif fault == "ignore failed ranks":
        monkeypatch.setattr(Job, "verdict", lambda job: (list(job.fills), []))
    elif fault == "forget pins":
        monkeypatch.setattr(TierIndex, "pin", lambda self, keys: None)
        monkeypatch.setattr(TierIndex, "unpin", lambda self, keys: None)
        monkeypatch.setattr(Planner, "check", lambda self: None)
    else:
        monkeypatch.setattr(
            "offload.planner.jobs.Job.answer",
            property(lambda job: JobResult(job.result.ranks, lost=job.result.lost)),
        )
    seen = False
    for seed in range(SEEDS):
        world = PlannerWithRanks(seed)
        try:
            live(world)
            world.drain()
        except (AssertionError, KeyError):
            seen = True
        if seen or world.mismatches:
            return
    raise AssertionError(f"{fault!r} was not detected in {SEEDS} worlds")


def make(slots: int = 4, disk_chunks: int = 8) -> Planner:
    groups = {GROUP: GroupInfo("full", 16, (100,))}
    cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
    disk = TierIndex("disk", ByteCapacity(disk_chunks * 100), LruPolicy())
    return Planner(groups, cpu, [disk])


def wanted(*numbers: int, block: int = 1) -> ChunkBatch:
    count = len(numbers)
    keys = [key_of(n) for n in numbers]
    return ChunkBatch(keys, GROUP, list(range(block, block + count)), [16] * count)


def finish(planner: Planner, *jobs: int) -> None:
    planner.complete(StepReport({job: JobResult() for job in jobs}))


def stored(planner: Planner, *numbers: int) -> None:
    """Store chunks and let the write-through end too."""
    planner.stores.plan(wanted(*numbers))
    while planner.busy:
        plan = planner.step()
        finish(planner, *(job.job for job in (*plan.stores, *plan.write_throughs)))


def test_a_chunk_is_stored_once() -> None:
    planner = make()
    assert planner.stores.plan(wanted(1, 2)) == 2
    assert planner.stores.plan(wanted(1, 2, block=7)) == 2
    assert [store.slots for store in planner.step().stores] == [(0, 1)]


def test_a_store_that_finds_no_slot_can_be_offered_again() -> None:
    planner = make(slots=2)
    assert planner.stores.plan(wanted(1, 2, 3)) == 2
    assert planner.stats.store_refusals == 1
    plan = planner.step()
    finish(planner, plan.stores[0].job)
    planner.step()
    assert planner.stores.plan(wanted(1, 2, 3), may_wait=True) == 2  # one chunk waits to be written


def test_concurrent_stores_are_bounded() -> None:
    groups = {GROUP: GroupInfo("full", 16, ())}
    cpu = TierIndex("cpu", SlotCapacity(8), LruPolicy())
    planner = Planner(groups, cpu, (), PlannerSettings(WorkLimits(store_chunks=3)))
    assert planner.stores.plan(wanted(1, 2)) == 2
    assert planner.stores.plan(wanted(3, 4, 5, block=3)) == 1
    first, second = planner.step().stores
    assert planner.stores.plan(wanted(4, 5, block=4)) == 0, "the stores are still in progress"
    finish(planner, first.job)
    assert planner.stores.plan(wanted(4, 5, 6, block=4)) == 2
    finish(planner, second.job)
    planner.check()


def test_a_committed_chunk_is_written_through_and_then_found_below() -> None:
    planner = make(slots=2)
    stored(planner, 1, 2)
    stored(planner, 3, 4)
    assert planner.stats.tier(CPU).evicted_chunks == 2
    tokens = planner.loads.plan("r", [wanted(1, 3)])
    assert tokens.by_tier == {0: 16, CPU: 16}
    items = planner.step().loads[0].items
    assert [(item.tier, item.slot >= 0) for item in items] == [(0, True), (IN_SLAB, True)]


def test_a_load_larger_than_the_cpu_tier_is_staged() -> None:
    planner = make(slots=2)
    for numbers in ((1, 2), (3, 4), (5, 6)):
        stored(planner, *numbers)
    planner.loads.plan("r", [wanted(1, 2, 3, 4, 5, 6)])
    items = planner.step().loads[0].items
    assert [item.slot == STAGED for item in items] == [True] * 4 + [False] * 2


def test_two_requests_share_one_read() -> None:
    planner = make(slots=2)
    stored(planner, 1)
    stored(planner, 2, 3)
    planner.loads.plan("a", [wanted(1)])
    planner.loads.plan("b", [wanted(1, block=9)])
    first, second = planner.step().loads
    assert first.items[0].tier == 0
    assert second.items[0].tier == IN_SLAB
    assert second.items[0].slot == first.items[0].slot


def test_a_lost_record_is_forgotten_and_deleted_on_every_rank() -> None:
    planner = make(slots=2)
    stored(planner, 1)
    stored(planner, 2, 3)
    planner.loads.plan("a", [wanted(1)])
    job = planner.step().loads[0].job
    lost = frozenset({key_of(1)})
    planner.complete(StepReport({job: JobResult(bad=lost, lost=lost)}))
    assert not any(key_of(1) in holder for holder in planner.sources.holders())
    assert planner.step().deletes == {0: (key_of(1),)}
    assert planner.stats.load_failures == 1


def test_a_chunk_that_is_forgotten_while_it_is_written_is_deleted() -> None:
    planner = make()
    planner.stores.plan(wanted(1))
    finish(planner, planner.step().stores[0].job)
    (write_through,) = planner.step().write_throughs
    planner.forget([key_of(1)])
    finish(planner, write_through.job)
    assert key_of(1) not in planner.lower[0]
    assert planner.step().deletes == {0: (key_of(1),)}, "the ranks have written it"


def test_an_unsent_store_whose_block_is_reused_is_cancelled() -> None:
    planner = make()
    planner.stores.plan(wanted(1, 2))
    planner.stores.fence([2])
    plan = planner.step()
    assert plan.stores == ()
    assert plan.fence == ()
    assert planner.cpu.space.used == 0


def test_a_sent_store_whose_block_is_reused_is_fenced() -> None:
    planner = make()
    planner.stores.plan(wanted(1, 2))
    job = planner.step().stores[0].job
    planner.stores.fence([2, 77])
    assert planner.step().fence == (job,)


def test_distrusted_stores_are_never_committed() -> None:
    """A fence may have been missed: the content of the blocks is unknown."""
    planner = make()
    planner.stores.plan(wanted(1))
    sent = planner.step().stores[0].job
    planner.stores.plan(wanted(2, block=9))
    planner.stores.distrust()
    assert planner.step().stores == (), "stores that were not sent must be cancelled"
    finish(planner, sent)
    assert not any(key_of(n) in holder for n in (1, 2) for holder in planner.sources.holders())
    planner.check()
    planner.stores.plan(wanted(1))
    finish(planner, planner.step().stores[0].job)
    assert key_of(1) in planner.cpu, "the next store is trusted again"


def test_after_a_reset_nothing_is_written_before_the_new_epoch() -> None:
    """A tier that is still at the old epoch would keep new chunks under it."""
    planner = make()
    planner.forget_all()
    planner.stores.plan(wanted(1))
    finish(planner, planner.step().stores[0].job)
    assert key_of(1) in planner.cpu
    assert planner.step().write_throughs == ()
    planner.begin_epochs({0: 2})
    planner.stores.plan(wanted(2))
    finish(planner, planner.step().stores[0].job)
    assert [write_through.keys for write_through in planner.step().write_throughs] == [(key_of(2),)]


def test_after_a_reset_late_stores_are_not_found() -> None:
    planner = make()
    planner.stores.plan(wanted(1))
    job = planner.step().stores[0].job
    planner.forget_all()
    planner.begin_epochs({0: 1})
    finish(planner, job)
    assert not any(key_of(1) in holder for holder in planner.sources.holders())
    plan = planner.step()
    assert plan.reset
    assert plan.epochs == {0: 1}
    assert plan.write_throughs == ()
    planner.check()


def test_a_job_needs_every_rank_and_one_failed_rank_fails_it() -> None:
    groups = {GROUP: GroupInfo("full", 16, ())}
    cpu = TierIndex("cpu", SlotCapacity(2), LruPolicy())
    planner = Planner(groups, cpu, (), PlannerSettings(ranks=2))
    planner.stores.plan(wanted(1, 2))
    job = planner.step().stores[0].job
    finish(planner, job)
    assert key_of(1) not in planner.cpu
    bad = frozenset({key_of(2)})
    planner.complete(StepReport({job: JobResult(bad=bad)}))
    assert key_of(1) in planner.cpu
    assert key_of(2) not in planner.cpu


def staged_and_promoted(planner: Planner) -> tuple[int, int]:
    """Two loads of chunk 1 from the disk: one passes through a staging slot, because the CPU tier
    is full, and the next one reads the chunk into the CPU tier. Returns their jobs."""
    stored(planner, 1)
    stored(planner, 2)
    planner.cpu.pin([key_of(2)])
    planner.loads.plan("staged", [wanted(1, block=11)])
    (staged,) = planner.step().loads
    planner.cpu.unpin([key_of(2)])
    planner.loads.plan("promoted", [wanted(1, block=12)])
    (promoted,) = planner.step().loads
    assert staged.items[0].slot == STAGED != promoted.items[0].slot
    return staged.job, promoted.job


def test_no_load_joins_a_read_of_a_chunk_whose_content_was_wrong() -> None:
    """The chunk is dropped while another load reads it, so its slot can no longer be joined."""
    planner = make(slots=1)
    staged, promoted = staged_and_promoted(planner)
    bad = frozenset({key_of(1)})
    planner.complete(StepReport({staged: JobResult(bad=bad, mismatched=bad)}))
    assert not planner.sources.present(key_of(1))
    planner.loads.plan("later", [wanted(1, block=13)])
    (later,) = planner.step().loads
    assert later.items == (MISSING_CHUNK,), "the load fails"
    finish(planner, promoted)
    assert not planner.sources.present(key_of(1))
    planner.complete(StepReport({later.job: JobResult(bad=frozenset({b""}))}))
    planner.check()

"""Chunks of ended requests that wait for their store until their blocks are overwritten."""

from __future__ import annotations

from offload.index.capacity import SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.messages.report import JobResult, StepReport
from offload.planner.late_stores import LATE_CHUNKS_MAX
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.work_limits import WorkLimits
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import GROUP, key_of

IN_FLIGHT = 4


def make(slots: int = 64) -> Planner:
    cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
    settings = PlannerSettings(WorkLimits(store_chunks=IN_FLIGHT))
    return Planner({GROUP: GroupInfo("full", 16, ())}, cpu, (), settings)


def run(first: int, end: int, width: int = 1) -> ChunkBatch:
    """Chunk ``n`` is in the blocks from ``n * width`` on."""
    keys = [key_of(n) for n in range(first, end)]
    blocks = list(range(first * width, end * width))
    return ChunkBatch(keys, GROUP, blocks, list(range(16, 16 * (end - first) + 1, 16)))


def step(planner: Planner) -> int:
    """Run a step whose stores end before the next one; return how many chunks it has stored."""
    planner.stores.plan_late()
    plan = planner.step()
    planner.complete(StepReport({store.job: JobResult() for store in plan.stores}))
    planner.check()
    return sum(len(store.slots) for store in plan.stores)


def held(planner: Planner) -> list[int]:
    return sorted(int.from_bytes(key[:8], "big") for key in planner.cpu.resident)


def test_chunks_beyond_the_bound_on_stores_follow_in_later_steps() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, 10), None)
    assert planner.busy, "an idle engine must continue to step"
    assert [step(planner) for _ in range(4)] == [4, 4, 2, 0]
    assert held(planner) == list(range(10))
    assert not planner.busy


def test_requests_are_stored_in_the_order_of_their_ends() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, 6), None)
    planner.stores.late_stores.add(run(6, 12), None)
    step(planner)
    step(planner)
    assert held(planner) == list(range(8))


def test_what_waits_comes_before_running_requests() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, 3), None)
    planner.stores.plan_late()
    assert planner.stores.plan(run(20, 30)) == 1


def test_a_chunk_whose_block_is_overwritten_is_dropped_with_those_behind_it() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, 10, width=2), None)
    planner.stores.late_stores.add(run(10, 12, width=2), None)
    planner.stores.fence(iter([13, 99]))
    assert planner.stores.late_stores.chunks == 8
    while planner.busy:
        step(planner)
    assert held(planner) == [*range(6), 10, 11]


def test_nothing_waits_after_a_change_of_content_that_no_fence_announces() -> None:
    for end in ("distrust", "cancel_planned"):
        planner = make()
        planner.stores.late_stores.add(run(0, 10), None)
        getattr(planner.stores, end)()
        assert not planner.busy
        assert step(planner) == 0
    planner.stores.late_stores.add(run(0, 10), None)
    planner.forget_all()
    step(planner)
    assert held(planner) == []


def test_chunks_for_which_no_space_will_be_free_are_given_up() -> None:
    """If the chunks were kept, an idle engine would continue to step without need."""
    planner = make(slots=6)
    planner.cpu.retention.register_client_pins({key_of(n) for n in range(6)})
    planner.stores.late_stores.add(run(0, 10), None)
    steps = 0
    while planner.busy:
        steps += 1
        step(planner)
        assert steps < 10
    assert held(planner) == list(range(6))


def test_few_chunks_wait() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, LATE_CHUNKS_MAX - 1), None)
    planner.stores.late_stores.add(run(LATE_CHUNKS_MAX, 2 * LATE_CHUNKS_MAX), None)
    planner.stores.late_stores.add(run(2 * LATE_CHUNKS_MAX, 3 * LATE_CHUNKS_MAX), None)
    assert planner.stores.late_stores.chunks == LATE_CHUNKS_MAX


def test_chunks_that_another_request_has_stored_are_not_stored_again() -> None:
    planner = make()
    planner.stores.late_stores.add(run(0, 8), None)
    planner.stores.late_stores.add(run(0, 8), None)
    assert sum(step(planner) for _ in range(4)) == 8
    assert not planner.busy

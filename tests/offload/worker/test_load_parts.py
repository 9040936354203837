"""A load that arrives in parts on a rank ends once, with its last part. If it ends earlier, for any
reason, it leaves nothing that other loads could take for a chunk."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from offload.messages.plan import IN_SLAB, STAGED, LoadItem, LoadJob, StepPlan
from offload.planner.loads import MISSING_CHUNK
from offload.worker import executor as executor_module
from offload.worker.loads import LoadTask, RankLoads
from offload.worker.open_loads import OpenLoads
from tests.offload.small_model import compute, keys, wrong_blocks
from tests.offload.worker.test_executor import KEYS, Rank, fill, rank_with
from tests.sim.virtual_time import run_virtually
from tiers.testing.faults import HoldingTier, nth
from tiers.testing.memory_tier import MemoryTier

TO = [10, 11, 12]


def part(number: int, slots: list[int], *, last: bool = False, tier: int = 0) -> LoadJob:
    """A part with one chunk per slot: chunk ``number`` and the following ones."""
    chunks = range(number, number + len(slots))
    items = [
        LoadItem(KEYS[n], 0, (TO[n],), slot, tier) for n, slot in zip(chunks, slots, strict=True)
    ]
    return LoadJob(7, "r", items, number, last)


def post(rank: Rank, *loads: LoadJob, **more: Any) -> None:
    rank.executor.post(StepPlan(loads=loads, **more))


async def all_parts(rank: Rank) -> None:
    """Three parts: one that is read into a slot, one that only passes through staging, and one that
    waits for the others."""
    post(rank, part(0, [4]))
    done = await rank.turn()
    assert not done.finished
    assert not done.report.results
    post(rank, part(1, [STAGED]))
    assert not (await rank.turn()).finished
    post(rank, part(2, [5], last=True))
    done = await rank.turn()
    assert (done.finished, done.failed) == ({"r"}, set())
    assert not done.report.results[7].failed
    assert wrong_blocks(rank.caches, keys(3), TO) == []
    assert not rank.executor._loads._open


async def ready(rank: Rank, tier: MemoryTier) -> None:
    await fill(rank, tier, 3)
    compute(rank.caches, keys(3, 9), TO)  # other content


async def test_a_load_ends_with_its_last_part() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        await all_parts(rank)


async def test_a_load_that_ends_with_its_first_part_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault."""
    add = LoadTask.add

    def whole(self: LoadTask, job: LoadJob) -> None:
        add(self, job)
        self._is_whole = True

    monkeypatch.setattr(LoadTask, "add", whole)
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        with pytest.raises(AssertionError):
            await all_parts(rank)


async def test_parts_may_arrive_before_the_loop_runs() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]), part(1, [5]))
        post(rank, part(2, [6], last=True))
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r"}, set())
        assert wrong_blocks(rank.caches, keys(3), TO) == []


async def test_a_part_without_chunks_ends_a_load() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]))
        await rank.turn()
        post(rank, LoadJob(7, "r", (), 1, True))
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r"}, set())


async def test_a_chunk_that_no_tier_holds_fails_the_load() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]))
        await rank.turn()
        post(rank, LoadJob(7, "r", [LoadItem(b"", 0, (), STAGED, IN_SLAB)], 1, True))
        done = await rank.turn()
        assert done.failed == {"r"}
        assert done.report.results[7].bad == {b""}
        assert not done.report.results[7].failed, "the chunk that was read must be kept"


async def after_the_end(rank: Rank) -> None:
    """A reset ends the load; a part that was on its way arrives later. No other load may take the
    content of its slot for its chunk."""
    post(rank, part(0, [4]))
    await rank.turn()
    post(rank, cancel_loads=True)
    done = await rank.turn()
    assert done.failed == {"r"}
    assert done.report.results[7].failed
    post(rank, part(1, [5]), part(2, [6], last=True))
    done = await rank.turn()
    assert not done.finished
    assert not done.report.results
    join = LoadJob(8, "joins", [LoadItem(KEYS[1], 0, (13,), 5, IN_SLAB)])
    post(rank, join)
    done = await rank.turn()
    assert done.failed == {"joins"}
    assert done.report.results[8].bad == {KEYS[1]}


async def test_a_part_that_arrives_after_the_end_is_not_read() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        await after_the_end(rank)


async def test_slots_of_unread_parts_must_not_look_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault."""
    monkeypatch.setattr(RankLoads, "refuse", lambda self, jobs: None)
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        with pytest.raises(AssertionError):
            await after_the_end(rank)


def test_a_later_part_that_hangs_fails_at_the_deadline() -> None:
    run_virtually(hang_in_a_later_part())


async def hang_in_a_later_part() -> None:
    inner = MemoryTier(1 << 20)
    tier = HoldingTier(inner, nth(2), methods={"read"})
    async with rank_with(tier) as rank:
        await ready(rank, inner)
        post(rank, part(0, [4]))
        assert not (await rank.turn()).finished
        post(rank, part(1, [5, 6], last=True))
        done = await rank.turn()
        assert not done.finished
        await asyncio.sleep(rank.executor.limits.load_timeout_s)
        rank.add(done, await rank.turn())
        assert done.failed == {"r"}
        assert not done.report.results, "the slots must stay reserved until the read returns"
        tier.release()
        assert (await rank.turn()).report.results[7].late


def test_the_time_between_parts_does_not_count() -> None:
    """The scheduler's steps may take longer than a load may; a read may not."""
    run_virtually(a_long_time_between_parts())


async def a_long_time_between_parts() -> None:
    inner = MemoryTier(1 << 20)
    tier = HoldingTier(inner, nth(2), methods={"read"})
    async with rank_with(tier) as rank:
        await ready(rank, inner)
        post(rank, part(0, [4]))
        assert not (await rank.turn()).finished
        # half a timeout later than any time at which the worker looks for late loads
        await asyncio.sleep(10.5 * rank.executor.limits.load_timeout_s)
        assert not (await rank.turn()).finished
        post(rank, part(1, [5, 6], last=True))
        await tier.waiting()
        await asyncio.sleep(0.9 * rank.executor.limits.load_timeout_s)
        assert not (await rank.turn()).finished, "the time of the newest part counts"
        tier.release()
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r"}, set())


async def test_a_part_that_cannot_be_posted_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]))
        await rank.turn()

        def broken() -> None:
            raise RuntimeError("no event")

        monkeypatch.setattr(rank.engine, "record_event", broken)
        post(rank, part(1, [5]))
        done = await rank.turn()
        assert done.failed == {"r"}
        assert done.report.results[7].failed


async def test_a_loop_that_is_blocked_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model-runner thread ends the load after its last part; when the loop runs again, the load
    ends there too."""
    monkeypatch.setattr(executor_module, "LOOP_STALL_S", 0.0)
    tier = MemoryTier(1 << 20)
    async with rank_with(tier, load_timeout_s=0.0) as rank:
        await ready(rank, tier)
        rank.executor.limits = executor_module.ExecutorLimits(load_timeout_s=5.0)
        post(rank, part(0, [4]))
        await rank.turn()
        rank.executor.limits = executor_module.ExecutorLimits(load_timeout_s=-1.0)
        post(rank, part(1, [5]))
        assert not rank.executor.drain().finished, "more parts will follow"
        post(rank, part(2, [6], last=True))
        drained = rank.executor.drain()  # the loop has not run
        assert drained.failed == {"r"}
        done = await rank.turn()
        assert not done.finished, "a request ends once"
        assert 7 in done.report.results


async def test_a_load_with_a_missing_part_fails() -> None:
    """A plan that cannot be understood loses a part in the middle, and the last part arrives."""
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]))
        await rank.turn()
        post(rank, part(2, [5], last=True))
        done = await rank.turn()
        assert done.failed == {"r"}
        assert done.report.results[7].failed


async def test_an_unreadable_plan_ends_the_loads_that_it_continues() -> None:
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await ready(rank, tier)
        post(rank, part(0, [4]))
        await rank.turn()
        post(rank, LoadJob(8, "s", b"no message"), part(1, [5]))
        done = await rank.turn()
        assert done.failed == {"r", "s"}, "it waits for its last part"
        assert done.report.results[7].failed
        post(rank, part(2, [6], last=True))
        assert not (await rank.turn()).failed


def test_a_chunk_that_no_tier_holds_survives_pickling() -> None:
    found = pickle.loads(pickle.dumps(LoadJob(1, "r", (MISSING_CHUNK,), 1, True)))
    assert found.items == (MISSING_CHUNK,)


def test_a_load_is_due_after_its_last_part() -> None:
    loads = OpenLoads()
    loads.expect([part(0, [4])], 1.0)
    assert not loads.give_up_overdue(100.0)
    loads.expect([part(1, [4], last=True)], 50.0)
    assert not loads.give_up_overdue(49.0)
    assert loads.give_up_overdue(51.0) == 1
    assert loads.take_ended() == [("r", False)]
    loads.expect([part(2, [4], last=True)], 50.0)
    assert not loads.give_up_overdue(51.0), "it has ended already"
    loads.expect([part(0, [4])], 1.0)
    loads.end(7, is_ok=True)
    assert loads.take_ended() == [("r", True)]
    loads.expect([part(1, [4], last=True)], 2.0)
    assert not loads.give_up_overdue(3.0)
    loads.expect([LoadJob(8, "", ())], 1.0)
    assert not loads.give_up_overdue(3.0), "no request waits for a probe"

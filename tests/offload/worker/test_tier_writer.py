"""A failed delete or reset of a tier is repeated before the next write."""

from __future__ import annotations

import pytest

from offload.messages.plan import StepPlan, WriteThroughJob
from offload.worker.tier_monitor import close_tier
from tests.offload.small_model import compute, keys
from tests.offload.worker.test_executor import KEYS, Rank, load, rank_with, store
from tests.unprintable import Unprintable
from tiers.base import TierError
from tiers.testing.faults import FailingTier, HoldingTier, nth
from tiers.testing.memory_tier import MemoryTier

RECORD = 8192


async def fill(rank: Rank, first: int, job: int, slots: list[int]) -> None:
    """Compute the content of keys from ``first`` on and store it into slots."""
    blocks = list(range(10, 10 + len(slots)))
    compute(rank.caches, keys(len(slots), first), blocks)
    rank.executor.post(StepPlan(stores=(store(job, blocks, slots),)))
    assert not (await rank.turn()).report.results[job].failed


async def write_through(rank: Rank, job: int, numbers: list[int], slots: list[int]) -> bool:
    """Write chunks; return whether they were accepted."""
    plan = WriteThroughJob(job, 0, 0, tuple(KEYS[n] for n in numbers), tuple(slots))
    rank.executor.post(StepPlan(write_throughs=(plan,)))
    result = (await rank.turn()).report.results[job]
    return not (result.failed or result.bad)


async def test_a_tier_whose_reset_failed_accepts_nothing_and_returns_nothing_old() -> None:
    """Such a tier would return OK for a write of a key that it holds, and keep the old weights'
    record."""
    medium = MemoryTier(1 << 20)
    tier = FailingTier(medium, lambda call: call <= 2, methods={"reset"})
    async with rank_with(tier) as rank:
        await fill(rank, 0, 1, [0])
        assert await write_through(rank, 2, [0], [0])
        rank.executor.post(StepPlan(reset=True, epochs={0: 1}))
        await rank.turn()
        await fill(rank, 5, 3, [0])  # the first key computed with the new weights
        assert not await write_through(rank, 4, [0], [0]), "the second try fails too"
        assert medium.epoch == 0
        assert await write_through(rank, 5, [0], [0])
        assert tier.met == 2
        assert medium.epoch == 1
        rank.executor.post(StepPlan(loads=(load(6, [3], [20], tier=0),)))
        await rank.turn()
        for layer in ("layers.0", "layers.1"):
            assert (rank.caches[layer][20] == rank.caches[layer][10]).all(), "new content"


async def test_records_rejected_by_a_full_tier_are_reported() -> None:
    medium = MemoryTier(RECORD)  # space for one record
    async with rank_with(medium) as rank:
        await fill(rank, 0, 1, [0, 1])
        plan = WriteThroughJob(2, 0, 0, (KEYS[0], KEYS[1]), (0, 1))
        rank.executor.post(StepPlan(write_throughs=(plan,)))
        result = (await rank.turn()).report.results[2]
        assert not result.failed
        assert set(KEYS[:2]) - result.bad == set(medium.records)
        assert len(result.bad) == rank.executor.stats.write_failures == 1


async def test_a_reset_waits_for_the_writes_before_it() -> None:
    """Records that are being written belong to the old weights, and therefore to the old epoch."""
    medium = MemoryTier(1 << 20)
    tier = HoldingTier(medium, methods={"write"})
    async with rank_with(tier) as rank:
        await fill(rank, 0, 1, [0])
        plan = WriteThroughJob(2, 0, 0, (KEYS[0],), (0,))
        rank.executor.post(StepPlan(write_throughs=(plan,)))
        await tier.waiting()
        rank.executor.post(StepPlan(reset=True, epochs={0: 5}))
        await rank.turn()
        assert medium.epoch == 0
        tier.release()
        await rank.turn()
        await rank.executor.settle()
        assert (medium.epoch, medium.records) == (5, {})


async def test_a_failed_deletion_is_repeated_before_the_next_write() -> None:
    medium = MemoryTier(RECORD)  # space for one record
    tier = FailingTier(medium, nth(1), methods={"delete"})
    async with rank_with(tier) as rank:
        await fill(rank, 0, 1, [0, 1])
        assert await write_through(rank, 2, [0], [0])
        rank.executor.post(StepPlan(deletes={0: (KEYS[0],)}))
        await rank.turn()
        assert tier.met == 1
        assert KEYS[0] in medium.records
        assert await write_through(rank, 3, [1], [1]), (
            "the space of the deleted record must be free"
        )
        assert list(medium.records) == [KEYS[1]]


async def test_a_key_that_is_written_again_is_not_deleted_later() -> None:
    medium = MemoryTier(1 << 20)
    tier = FailingTier(medium, lambda call: call <= 2, methods={"delete"})
    async with rank_with(tier) as rank:
        await fill(rank, 0, 1, [0, 1])
        assert await write_through(rank, 2, [0], [0])
        rank.executor.post(StepPlan(deletes={0: (KEYS[0],)}))
        await rank.turn()
        assert await write_through(rank, 3, [0], [0])
        assert await write_through(rank, 4, [1], [1])
        assert tier.met == 2
        assert sorted(medium.records) == sorted(KEYS[:2])


async def test_errors_without_a_text_are_failures_of_the_tier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The jobs are answered, and the log says what can be said."""

    class Error(Unprintable, TierError):
        pass

    class Failing(FailingTier):
        async def aclose(self) -> None:
            raise Unprintable

    tier = Failing(MemoryTier(1 << 20), methods={"read", "write"}, error=Error)
    async with rank_with(tier) as rank:
        await fill(rank, 0, 1, [0])
        assert not await write_through(rank, 2, [0], [0])
        rank.executor.post(StepPlan(loads=(load(3, [1], [5], tier=0),)))
        assert (await rank.turn()).failed == {"r3"}
    await close_tier(tier, 1.0)
    for what in ("writes are skipped: Error", "not be read: Error", "not close: Unprintable"):
        assert f"{what} (its __repr__ raises)" in caplog.text

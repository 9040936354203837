"""A plan whose copies cannot begin must not lose its resets, epochs and deletions."""

from __future__ import annotations

import pytest

import offload.worker.executor
from offload.messages.plan import STAGED, Keys, StepPlan, WriteThroughJob
from offload.worker.rank_health import PAUSE_S
from tests.clock import Clock
from tests.offload.small_model import compute, keys, wrong_blocks
from tests.offload.worker.test_executor import KEYS, Rank, load, rank_with, store
from tiers.testing.memory_tier import MemoryTier


async def write(rank: Rank, job: int, seed: int) -> None:
    """Store the content of one chunk and write it through."""
    compute(rank.caches, keys(1, seed), [1])
    rank.executor.post(StepPlan(stores=(store(job, [1], [0]),)))
    assert not (await rank.turn()).report.results[job].failed
    written = WriteThroughJob(job + 1, 0, 0, KEYS[:1], (0,))
    rank.executor.post(StepPlan(write_throughs=(written,)))
    assert not (await rank.turn()).report.results[job + 1].bad


async def post_without_event(rank: Rank, patch: pytest.MonkeyPatch, plan: StepPlan) -> None:
    """Post a plan at whose step the GPU's driver fails."""

    def fail() -> object:
        raise RuntimeError("out of memory")

    with patch.context() as during:
        during.setattr(rank.engine, "record_event", fail)
        rank.executor.post(plan)


async def test_no_chunk_of_old_weights_is_loaded_after_a_failed_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = MemoryTier(1 << 20)
    clock = Clock.replace(offload.worker.executor, monkeypatch)
    async with rank_with(tier) as rank:
        await write(rank, 1, seed=0)
        plan = StepPlan(stores=(store(3, [2], [1]),), reset=True, epochs={0: 5})
        await post_without_event(rank, monkeypatch, plan)
        assert (await rank.turn()).report.results[3].failed
        clock.ahead_s += PAUSE_S
        await rank.turn()  # from now on the rank stores again
        await write(rank, 4, seed=5)  # the same key, computed with new weights
        rank.executor.post(StepPlan(loads=(load(6, [STAGED], [9], tier=0),)))
        assert (await rank.turn()).failed == set()
        assert wrong_blocks(rank.caches, keys(1, 5), [9]) == []
        assert tier.epoch == 5


async def test_deletions_reach_the_tier_after_a_failed_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The index no longer counts the space of their records."""
    tier = MemoryTier(1 << 20)
    async with rank_with(tier) as rank:
        await write(rank, 1, seed=0)
        plan = StepPlan(loads=(load(3, [0], [9]),), deletes={0: Keys(KEYS[:1])})
        await post_without_event(rank, monkeypatch, plan)
        assert (await rank.turn()).failed == {"r3"}
        assert tier.records == {}

"""Reads ahead on a rank: they wait for their turn, are joined, and are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from offload.messages.plan import LoadItem, LoadJob, StepPlan
from offload.worker import loads
from offload.worker.loads import AHEAD_WAIT_S
from tests.offload.worker.test_executor import KEYS, Rank, fill, load, rank_with
from tests.sim.virtual_time import run_virtually
from tiers.testing.faults import HoldingTier, nth
from tiers.testing.memory_tier import MemoryTier

AHEAD, SLOT = 5, 6


def ahead() -> LoadJob:
    """A read ahead of the first chunk."""
    return LoadJob(AHEAD, "", [LoadItem(KEYS[0], 0, (), SLOT, 0)], is_ahead=True)


@asynccontextmanager
async def busy_disk() -> AsyncIterator[tuple[Rank, HoldingTier]]:
    """A rank whose disk is busy with the read of a load, and a read ahead that waits behind it."""
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier, reads_in_flight=1) as rank:
        await fill(rank, memory, 1)
        rank.executor.post(StepPlan(loads=(load(1, [3], [9], tier=0),)))
        await tier.waiting()
        rank.executor.post(StepPlan(loads=(ahead(),)))
        await rank.plans_are_taken()
        yield rank, tier


async def ahead_of_a_busy_disk() -> None:
    async with busy_disk() as (rank, tier):
        await asyncio.sleep(AHEAD_WAIT_S - 1)
        done = await rank.turn()
        assert done.failed == {"r1"}
        assert AHEAD not in done.report.results
        tier.release()
        done = await rank.turn()
        assert not done.report.results[AHEAD].bad
        assert not done.report.results[AHEAD].failed


async def timed_after_its_wait() -> None:
    async with busy_disk() as (rank, tier):
        await asyncio.sleep(rank.executor.limits.load_timeout_s / 2)
        tier.release()
        while AHEAD not in (results := (await rank.turn()).report.results):
            pass
        assert results[AHEAD].seconds < 1.0


async def ahead_of_a_disk_that_stays_busy() -> None:
    async with busy_disk() as (rank, tier):
        await asyncio.sleep(AHEAD_WAIT_S + 1)
        result = (await rank.turn()).report.results[AHEAD]
        assert (result.failed, result.late) == (True, False)
        tier.release()
        await rank.turn()


async def joined_by_a_load_that_is_late() -> None:
    async with busy_disk() as (rank, tier):
        await asyncio.sleep(1)
        rank.executor.post(StepPlan(loads=(load(2, [SLOT], [10]),)))
        await asyncio.sleep(rank.executor.limits.load_timeout_s + 2)
        done = await rank.turn()
        assert "r2" in done.failed
        assert done.report.results[AHEAD].late
        tier.release()


async def slow_since_its_turn() -> None:
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier) as rank:
        await fill(rank, memory, 1)
        rank.executor.post(StepPlan(loads=(ahead(),)))
        await tier.waiting()
        await asyncio.sleep(2 * rank.executor.limits.load_timeout_s)
        tier.release()
        assert (await rank.turn()).report.results[AHEAD].late


async def beside_a_read_that_hangs() -> None:
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier) as rank:
        await fill(rank, memory, 1)
        rank.executor.post(StepPlan(loads=(load(1, [3], [9], tier=0),)))
        await tier.waiting()
        await asyncio.sleep(rank.executor.limits.tier_timeout_s + 1)
        await rank.turn()
        rank.executor.post(StepPlan(loads=(ahead(),)))
        await asyncio.sleep(1)
        assert not (await rank.turn()).report.results[AHEAD].failed
        tier.release()


async def joined_after_a_long_wait() -> None:
    async with busy_disk() as (rank, tier):
        await asyncio.sleep(AHEAD_WAIT_S - 1)
        await rank.turn()
        rank.executor.post(StepPlan(loads=(load(2, [SLOT], [10]),)))
        await asyncio.sleep(rank.executor.limits.load_timeout_s - 1)
        tier.release()
        done = await rank.turn()
        assert (done.finished, done.failed) == ({"r2"}, set())
        assert not done.report.results[AHEAD].failed


async def given_up_behind_a_busy_disk() -> None:
    async with busy_disk() as (rank, tier):
        rank.executor.post(StepPlan(cancel_loads=True))
        done = await rank.turn()
        assert done.report.results[AHEAD].failed
        assert 1 not in done.report.results, "the other read may still write into its slot"
        tier.release()
        await rank.turn()


async def late_on_a_disk_that_hangs() -> None:
    memory = MemoryTier(1 << 20)
    tier = HoldingTier(memory, nth(1), methods={"read"})
    async with rank_with(tier) as rank:
        await fill(rank, memory, 1)
        rank.executor.post(StepPlan(loads=(ahead(),)))
        await tier.waiting()
        await asyncio.sleep(AHEAD_WAIT_S + rank.executor.limits.load_timeout_s)
        tier.release()
        done = await rank.turn()
        assert done.report.results[AHEAD].late
        stats = rank.executor.stats
        assert (stats.load_timeouts, stats.load_seconds) == (0, 0.0)


def test_a_read_ahead_waits_for_its_turn_longer_than_a_load_may_take() -> None:
    run_virtually(ahead_of_a_busy_disk())


def test_the_time_of_a_read_ahead_begins_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ahead does not save the time for which a read waits for other reads."""
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(loads, "time", clock)
    run_virtually(timed_after_its_wait())


def test_a_read_ahead_without_a_turn_is_given_up_and_is_not_late() -> None:
    """Such a read says nothing about the speed of the tier."""
    run_virtually(ahead_of_a_disk_that_stays_busy())


def test_a_read_ahead_that_a_load_joins_gets_the_time_of_a_load() -> None:
    run_virtually(joined_after_a_long_wait())


def test_a_read_ahead_that_is_given_up_does_not_wait_for_its_turn() -> None:
    run_virtually(given_up_behind_a_busy_disk())


def test_a_late_read_ahead_is_not_a_late_load() -> None:
    run_virtually(late_on_a_disk_that_hangs())


def test_a_read_ahead_that_a_load_joins_is_late_when_the_load_is() -> None:
    run_virtually(joined_by_a_load_that_is_late())


def test_a_read_ahead_that_is_slow_since_its_turn_is_late() -> None:
    run_virtually(slow_since_its_turn())


def test_one_read_that_hangs_does_not_end_reading_ahead() -> None:
    run_virtually(beside_a_read_that_hangs())

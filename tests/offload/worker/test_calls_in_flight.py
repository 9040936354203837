"""A tier that answers quickly gets more calls at a time, and a slow one fewer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from offload.messages.plan import WriteThroughJob
from offload.telemetry.counters import WorkerStats
from offload.worker.rank_memory import RankMemory
from offload.worker.read_turns import ReadTurns
from offload.worker.tier_monitor import (
    CALLS_MAX,
    CALLS_MIN,
    QUICK_S,
    SLOW_S,
    CallsInFlight,
    WatchedTier,
)
from offload.worker.tier_writer import TierWriter
from tests.sim.virtual_time import run_virtually
from tiers.base import Buffer, Key, WriteOutcome
from tiers.slab.slab import HostSlab
from tiers.testing import key_of
from tiers.testing.memory_tier import MemoryTier

RECORD = 4096


def test_the_limit_follows_the_time_of_a_call() -> None:
    calls = CallsInFlight()
    assert calls.limit == CALLS_MIN
    for _ in range(2 * CALLS_MAX):
        calls.ended(QUICK_S)
    assert calls.limit == CALLS_MAX
    calls.ended((QUICK_S + SLOW_S) / 2)
    assert calls.limit == CALLS_MAX
    calls.ended(2 * SLOW_S)
    assert calls.limit == CALLS_MAX // 2
    for _ in range(CALLS_MAX):
        calls.ended(2 * SLOW_S)
    assert calls.limit == CALLS_MIN


def test_a_smaller_bound_is_kept() -> None:
    calls = CallsInFlight(1)
    for _ in range(CALLS_MAX):
        calls.ended(0.0)
        assert calls.limit == 1
    calls.ended(2 * SLOW_S)
    assert calls.limit == 1


class TimedTier(MemoryTier):
    """Each write takes ``seconds``. ``most`` is the largest number of writes at a time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1 << 30)
        self.seconds = seconds
        self.writing = self.most = 0

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        self.writing += 1
        self.most = max(self.most, self.writing)
        await asyncio.sleep(self.seconds)
        self.writing -= 1
        return await super().write(keys, buffers)


async def most_writes(seconds: float) -> int:
    """The largest number of writes at a time, of many that are queued."""
    tier = TimedTier(seconds)
    await tier.open()
    answered = set[int]()
    slab = HostSlab(RECORD, 1, background=False)
    with contextlib.closing(slab):
        group: Any = SimpleNamespace(record_bytes=RECORD)
        engine: Any = None  # nothing is copied
        watched = WatchedTier(tier, 1000.0, lambda _observed: None)
        writer = TierWriter(watched, RankMemory(slab, engine, {0: group}), WorkerStats())
        writer.start(lambda job, _result: answered.add(job))
        for job in range(4 * CALLS_MAX):
            writer.write(WriteThroughJob(job, 0, 0, (key_of(job),), (0,)))
        await writer.finish()
        writer.stop()
    assert len(answered) == 4 * CALLS_MAX
    return tier.most


def test_writes_at_a_time() -> None:
    assert run_virtually(most_writes(QUICK_S / 2)) == CALLS_MAX
    assert run_virtually(most_writes(2 * SLOW_S)) == CALLS_MIN


async def most_reads(seconds: float, *, passed_by: int = 0) -> int:
    turns = ReadTurns(CALLS_MAX)
    reading = most = 0

    async def read(slot: int) -> None:
        nonlocal reading, most
        async with turns.turn([slot], is_ahead=False):
            reading += 1
            most = max(most, reading)
            await asyncio.sleep(seconds)
            reading -= 1

    async def passed(slot: int) -> None:
        async with turns.turn([slot], is_ahead=False):
            pass

    held = [asyncio.ensure_future(read(slot)) for slot in range(CALLS_MIN)]
    await asyncio.sleep(0)
    rest = [asyncio.ensure_future(passed(CALLS_MIN + slot)) for slot in range(passed_by)]
    await asyncio.sleep(0)
    turns.release_waiting(range(CALLS_MIN, CALLS_MIN + passed_by))
    more = [asyncio.ensure_future(read(slot)) for slot in range(1000, 1000 + 4 * CALLS_MAX)]
    await asyncio.gather(*held, *rest, *more)
    return most


def test_reads_at_a_time() -> None:
    assert run_virtually(most_reads(QUICK_S / 2)) == CALLS_MAX
    assert run_virtually(most_reads(2 * SLOW_S)) == CALLS_MIN


def test_reads_that_were_given_up_say_nothing_about_the_tier() -> None:
    assert run_virtually(most_reads(2 * SLOW_S, passed_by=CALLS_MAX)) == CALLS_MIN

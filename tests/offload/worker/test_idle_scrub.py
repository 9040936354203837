"""A tier is scrubbed while no other operation uses it, within its rate, and the results reach the
scheduler."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from offload.messages.report import Observed
from offload.telemetry.counters import WorkerStats
from offload.worker.idle_scrub import (
    BATCH_BYTES,
    NOTHING_DUE_S,
    QUIET_S,
    TROUBLE_S,
    IdleScrub,
    ScrubLimits,
)
from offload.worker.tier_monitor import TierMonitor, WatchedTier
from tests.offload.planner.simulated_ranks import key_of
from tests.offload.planner.troubled_tiers import make, recover, report_seen, step
from tests.sim.virtual_time import run_virtually
from tests.unprintable import Unprintable
from tiers.base import Scrubbed, TierClosedError, TierIoError
from tiers.testing.memory_tier import MemoryTier

LIMITS = ScrubLimits(bytes_per_s=4 << 20, period_s=3600.0)


class Scrubbing(MemoryTier):
    """Records when it is scrubbed; returns prepared results."""

    def __init__(self, answer: Callable[[], Scrubbed | None]) -> None:
        super().__init__(1 << 20)
        self.answer = answer
        self.at: list[float] = []
        self.takes_s = 0.01

    async def scrub(self, bytes_max: int, period_s: float) -> Scrubbed | None:
        assert (bytes_max, period_s) == (BATCH_BYTES, LIMITS.period_s)
        self.at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        return self.answer()


def whole_batch() -> Scrubbed:
    return Scrubbed(4, BATCH_BYTES)


def scrubbing(
    answer: Callable[[], Scrubbed | None], seconds: float, beside: Callable[..., Awaitable[Any]]
) -> tuple[Scrubbing, list[Scrubbed]]:
    """Scrub a tier for that many seconds while ``beside(monitor)`` runs; return the tier and the
    reports."""
    found: list[Scrubbed] = []
    tier = Scrubbing(answer)

    async def main() -> None:
        watched = WatchedTier(tier, 5.0, lambda _seen: None)
        scrub = IdleScrub(watched, LIMITS, found.append)
        scrub.start()
        asked = asyncio.ensure_future(beside(watched.monitor))
        await asyncio.sleep(seconds)
        scrub.stop()
        asked.cancel()
        count = len(tier.at)
        await asyncio.sleep(seconds)
        assert len(tier.at) == count, "it was stopped"

    run_virtually(main())
    return tier, found


async def nothing(_monitor: TierMonitor) -> None:
    """No other operation uses the tier."""


def test_the_rate_is_kept() -> None:
    tier, found = scrubbing(whole_batch, 100.0, nothing)
    nbytes = sum(one.payload_bytes for one in found)
    assert 0.9 * 100.0 * LIMITS.bytes_per_s < nbytes <= 100.0 * LIMITS.bytes_per_s + BATCH_BYTES
    assert len(found) == len(tier.at)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_scrubbed_while_requests_read_or_have_just_read(seed: int) -> None:
    """No scrub begins, whatever the requests read and however long they take; scrubbing continues
    in between."""
    busy: list[tuple[float, float]] = []

    async def ask(monitor: TierMonitor) -> None:
        rng, loop = random.Random(seed), asyncio.get_running_loop()

        async def operation(seconds: float) -> list[Any]:
            await asyncio.sleep(seconds)
            if rng.random() < 0.2:
                raise TierIoError("planted")
            return []

        async def one(kind: str, seconds: float) -> None:
            began = loop.time()
            try:
                if kind == "change":
                    await monitor.change(operation(seconds))  # type: ignore[arg-type]  # its answer is not looked at
                else:
                    await getattr(monitor, kind)(operation(seconds), 0)
            except TierIoError:
                pass
            finally:
                busy.append((began, loop.time()))

        tasks = []
        while True:
            await asyncio.sleep(rng.choice([0.01, 0.5, 0.9, 1.5, 4.0]))
            kind = rng.choice(["read", "write", "query", "change"])
            tasks.append(asyncio.ensure_future(one(kind, rng.choice([0.001, 0.3, 7.0]))))

    tier, _ = scrubbing(whole_batch, 500.0, ask)
    assert len(tier.at) > 20
    assert len(busy) > 50
    for at in tier.at:
        assert not [pair for pair in busy if pair[0] < at < pair[1] + QUIET_S - 1e-9], at


def test_a_tier_with_no_record_due_is_checked_from_time_to_time() -> None:
    tier, found = scrubbing(lambda: None, 10 * NOTHING_DUE_S, nothing)
    assert len(tier.at) == 10
    assert found == []


@pytest.mark.parametrize("how", ["says so", "raises", "raises without a text"])
def test_a_failing_tier_is_left_alone_for_a_while(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> Scrubbed:
        if how == "raises":
            raise TierIoError("planted")
        if how == "raises without a text":
            raise Unprintable
        return Scrubbed(trouble="planted")

    tier, found = scrubbing(answer, 10 * TROUBLE_S, nothing)
    assert len(tier.at) == 10
    assert found == []
    assert [record.getMessage() for record in caplog.records].count(caplog.messages[0]) == 1
    assert "cannot be scrubbed" in caplog.text


def test_a_closed_tier_is_not_scrubbed_again() -> None:
    def answer() -> Scrubbed:
        raise TierClosedError("closed")

    tier, _ = scrubbing(answer, 1000.0, nothing)
    assert len(tier.at) == 1


def test_a_damaged_chunk_is_dropped_from_the_index_and_removed_on_every_rank() -> None:
    """One rank has found the damage; a chunk is present on all ranks or not at all."""
    planner = make(ranks=2)
    recover(planner, *range(4))
    disk, bad = planner.lower[0], key_of(2)
    report_seen(planner, rank=1, damaged=frozenset([bad, b"not there"]))
    assert bad not in disk
    assert all(key_of(number) in disk for number in (0, 1, 3))
    assert list(step(planner, 0.0).deletes[0]) == [bad]
    assert planner.stats.removed == {"disk0:corrupt": 1}
    report_seen(planner, damaged=frozenset([bad]))  # another rank finds the same damage
    assert planner.stats.removed == {"disk0:corrupt": 1}
    planner.check()


def test_findings_of_several_ranks_are_combined() -> None:
    one, two = (
        Observed(damaged=frozenset([b"a"])),
        Observed(reads_good=1, damaged=frozenset([b"b"])),
    )
    assert one.merge(two) == Observed(reads_good=1, damaged=frozenset([b"a", b"b"]))
    stats = WorkerStats()
    for _ in range(2):
        stats.scrubbed(0, 4, 1000, 1)
    totals = stats.totals()
    for name, count in (
        ("scrubbed_records", 8),
        ("scrubbed_bytes", 2000),
        ("scrub_damaged", 2),
        ("corrupt_records", 2),
    ):
        assert totals[f"{name}:0"] == count

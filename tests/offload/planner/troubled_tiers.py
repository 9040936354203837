"""A planner with lower tiers that may fail, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.messages.plan import LoadJob, StepPlan
from offload.messages.report import JobResult, Observed, StepReport
from offload.planner.circuit_breaker import BreakerState
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.tier_health import HealthLimits, TierHealth, TierHealths
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import QueueSettings
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import GROUP, key_of

FAILURES = 3
WAIT_S = 5.0
TOKENS = 512
"""Tokens of one chunk: enough to count as a measurement."""


def make(
    slots: int = 8,
    tiers: int = 1,
    ranks: int = 1,
    groups: Sequence[int] = (GROUP,),
    queue_settings: Sequence[QueueSettings] = (),
    **limits: int,
) -> Planner:
    infos = {group: GroupInfo("full", TOKENS, (100,) * tiers) for group in groups}
    cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
    lower = [TierIndex(f"disk{n}", ByteCapacity(6400), LruPolicy()) for n in range(tiers)]
    health = TierHealths([index.name for index in lower], HealthLimits(FAILURES))
    return Planner(
        infos,
        cpu,
        lower,
        PlannerSettings(WorkLimits(**limits), ranks=ranks, queue_settings=queue_settings),
        health=health,
    )


def recover(planner: Planner, *numbers: int, tier: int = 0) -> None:
    """The chunks with which the tier was found at start."""
    info = EntryInfo(GROUP, size_bytes=100)
    keys = [key_of(n) for n in numbers]
    assert planner.lower[tier].recover(keys, [info] * len(keys)) == []


def wanted(*numbers: int, block: int = 1) -> ChunkBatch:
    count = len(numbers)
    keys = [key_of(n) for n in numbers]
    return ChunkBatch(keys, GROUP, list(range(block, block + count)), [16] * count)


def report_seen(planner: Planner, tier: int = 0, rank: int = 0, **seen: Any) -> None:
    report = StepReport()
    report.add_observed(tier, rank, Observed(**seen))
    planner.complete(report)


def answer(planner: Planner, job: int, result: JobResult | None = None) -> None:
    planner.complete(StepReport({job: result or JobResult()}))


def step(planner: Planner, now: float) -> StepPlan:
    planner.tick(now)
    plan = planner.step()
    planner.check()
    return plan


def probe_of(plan: StepPlan) -> LoadJob:
    (probe,) = plan.loads
    assert probe.request == ""
    return probe


def break_reads(planner: Planner, tier: int = 0) -> TierHealth:
    report_seen(planner, tier, reads_failed=FAILURES)
    health = planner.health[tier]
    assert health.reads.state is BreakerState.OPEN
    return health


def break_writes(planner: Planner, tier: int = 0) -> TierHealth:
    report_seen(planner, tier, writes_failed=FAILURES)
    health = planner.health[tier]
    assert health.writes.state is BreakerState.OPEN
    return health


def found(planner: Planner, number: int) -> bool:
    assert planner.sources.present(key_of(number)) == any(
        key_of(number) in h for h in planner.sources.holders()
    )
    return planner.sources.present(key_of(number))


def store(planner: Planner, *numbers: int, now: float = 0.0) -> StepPlan:
    """Store chunks; return the plan that may contain their write-through."""
    planner.stores.plan(wanted(*numbers))
    answer(planner, step(planner, now).stores[0].job)
    return step(planner, now)

"""The state that the parts of one planner share: indexes, health, jobs, counters and step budget.

The planner makes one context and passes it to each of its parts, which keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.planner.jobs import JobTable
from offload.planner.step_budget import StepBudget
from offload.planner.tier_health import TierHealths
from offload.planner.work_limits import WorkLimits
from offload.telemetry.counters import PlannerStats
from offload.telemetry.removed_chunks import RemovalLog


@dataclass(frozen=True, slots=True, eq=False)
class PlannerContext:
    """The context that the parts of one planner share, on vLLM's scheduler thread.

    ``ranks`` workers answer every job; ``groups`` maps group ids to their geometry; ``cpu`` and
    ``lower`` are the indexes of the tiers, nearest first; ``shared`` are the numbers of the lower
    tiers that other engines write to as well; ``removals`` logs the chunks that left any tier.
    """

    ranks: int
    limits: WorkLimits
    groups: Mapping[int, GroupInfo]
    cpu: TierIndex
    lower: tuple[TierIndex, ...]
    shared: frozenset[int]
    health: TierHealths
    jobs: JobTable
    stats: PlannerStats
    budget: StepBudget
    removals: RemovalLog

    @property
    def indexes(self) -> dict[int, TierIndex]:
        """The index of every tier by its number, nearest first."""
        return dict(enumerate((self.cpu, *self.lower), CPU))

    def index(self, tier: int) -> TierIndex:
        """The index of one tier."""
        return self.cpu if tier == CPU else self.lower[tier]

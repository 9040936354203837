"""The state that the parts of one planner share.

Indexes, health, jobs, counters and the step budget. The planner makes one context and passes it to
each of its parts, which keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.config.schema import OffloadConfig
from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.report import RankState
from offload.planner.jobs import JobTable
from offload.planner.step_budget import STEP_CHUNKS, StepBudget
from offload.planner.tier_health import TierHealths
from offload.telemetry.counters import PlannerStats
from offload.telemetry.removed_chunks import RemovalLog

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Bounds on chunks in flight: ``store_chunks`` to the CPU tier, ``load_chunks`` to the GPU,
    into at most ``load_blocks`` blocks, and ``waiting_writes`` for each lower tier. A short step
    loads at most ``step_chunks``, and the bounds of its other work are proportional to this number
    (see ``StepBudget``); the rest follows in later steps."""

    store_chunks: int = NO_LIMIT
    load_chunks: int = NO_LIMIT
    load_blocks: int = NO_LIMIT
    waiting_writes: int = NO_LIMIT
    step_chunks: int = STEP_CHUNKS

    @classmethod
    def of_server(
        cls, config: OffloadConfig, ranks: Sequence[RankState], num_blocks: int
    ) -> WorkLimits:
        """The limits for a server with ``num_blocks`` blocks in its GPU cache."""
        chunk_bytes = ranks[0].slot_bytes * len(ranks)
        return cls(
            store_chunks=max(1, config.max_inflight_store // chunk_bytes),
            load_chunks=max(1, config.max_inflight_load // chunk_bytes),
            load_blocks=max(1, int(num_blocks * config.max_load_gpu_share)),
            waiting_writes=max(1, min(rank.slots for rank in ranks)),
        )


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

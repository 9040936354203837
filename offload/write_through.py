"""Write-through to all lower tiers: what of it a step does. Part of the planner, on its thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from offload.backlog import Backlog
from offload.budget import DEMOTE, DEMOTED, StepBudget
from offload.deletions import Deletions
from offload.demotion import DemotionQueue
from offload.index import TierIndex
from offload.ledger import Job, Ledger
from offload.plans import DemoteJob
from offload.shared import SharedTiers
from offload.stats import PlannerStats

JOBS_AT_ONCE = 8
"""Demotions of a tier that are taken in together: that costs less than one by one."""


class WriteThrough:
    """The ``queues`` of the lower tiers, by number; what a step demotes and takes in as demoted
    comes from its ``budget``. ``delete(tier, keys)`` has records deleted."""

    def __init__(
        self,
        queues: Sequence[DemotionQueue],
        cpu: TierIndex,
        ledger: Ledger,
        stats: PlannerStats,
        shared: SharedTiers,
        budget: StepBudget,
        delete: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        self.queues = tuple(queues)
        self._cpu = cpu
        self._ledger = ledger
        self._stats = stats
        self._shared = shared
        self._budget = budget
        self._delete = delete

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk waits for any tier."""
        return any(map(len, self.queues))

    def due(self, deletions: Deletions) -> tuple[DemoteJob, ...]:
        """Demote what the budget has left, shared by the tiers: none to one that is behind with
        deletions."""
        queues = [queue for queue in self.queues if not deletions.is_behind(queue.tier)]
        waiting = max(1, sum(1 for queue in queues if len(queue)))
        most = max(1, self._budget.left // (DEMOTE * waiting))
        demotes: list[DemoteJob] = []
        for queue in queues:
            jobs, evicted = queue.due(self._cpu, self._ledger, most)
            demotes += jobs
            self._delete(queue.tier, evicted)
            self._stats.evicted(queue.tier, evicted)
        return tuple(demotes)

    def answered(self, jobs: Sequence[Job], backlog: Backlog, now: float) -> None:
        """Demotions that every rank has answered."""
        for tier in {job.fill_tier for job in jobs}:
            mine = [job for job in jobs if job.fill_tier == tier]
            for first in range(0, len(mine), JOBS_AT_ONCE):
                some = mine[first : first + JOBS_AT_ONCE]
                cost = DEMOTED * sum(len(job.fills) for job in some)
                backlog.add(cost, partial(self._take_in, tier, some, now))

    def _take_in(self, tier: int, jobs: Sequence[Job], now: float) -> None:
        kept, bad, gone = self.queues[tier].ended(jobs, self._cpu, now)
        self._stats.stored(tier, kept, bad)
        self._shared.written(tier, kept, now)
        # What a rank may have written and the index does not keep (it failed on another, or was
        # forgotten meanwhile) must not take space, nor come back after a restart.
        self._delete(tier, gone)

"""Probes: reads of a few chunks of one tier, for no request. A probe tests a tier whose breaker is
open, or measures whether a slow tier has become faster. Pure."""

from __future__ import annotations

from collections import Counter

from offload.layout.keys import group_of
from offload.messages.plan import STAGED, LoadItem, LoadJob
from offload.planner.context import PlannerContext
from offload.planner.jobs import Job, JobKind, LoadTokens
from offload.planner.load_sources import LoadSources
from offload.planner.presence import PresenceCache
from offload.planner.step_budget import PROBE_CHUNKS


class TierProbes:
    """Plans probes, and reports their results to the health of the tier. Owned by the planner; used
    on its thread.

    ``planned`` are the probes of this step.
    """

    def __init__(
        self, context: PlannerContext, sources: LoadSources, presence: PresenceCache
    ) -> None:
        self.planned: list[LoadJob] = []
        self._context = context
        self._sources = sources
        self._presence = presence

    def take(self) -> tuple[LoadJob, ...]:
        """The probes planned since the previous call."""
        planned, self.planned = tuple(self.planned), []
        return planned

    def plan(self, tier: int, now: float) -> None:
        """Plan a probe of a lower tier. A shared tier whose breaker is open is only queried."""
        health = self._context.health[tier]
        if tier in self._context.shared and not health.reads.closed:
            health.begin_probe(self._presence.plan_probe(tier, now))
        else:
            health.begin_probe(self._plan_read(tier))

    def _plan_read(self, tier: int) -> int | None:
        """Plan to read a few chunks. Returns the job, or ``None`` if the tier holds no chunks."""
        index = self._context.lower[tier]
        keys = index.some(PROBE_CHUNKS)
        if not keys:
            return None
        job = self._context.jobs.next_id()
        index.pin(keys)
        tokens = LoadTokens(self._sources.tokens(Counter((group_of(key), tier) for key in keys)))
        self._context.jobs.open(Job(job, JobKind.PROBE, pins=((tier, keys),), tokens=tokens))
        items = tuple(LoadItem(key, group_of(key), (), STAGED, tier) for key in keys)
        self.planned.append(LoadJob(job, "", items))
        return job

    def ended(self, job: Job, now: float) -> None:
        """Finish a probe that every rank has answered."""
        for tier, keys in job.pins:
            self._context.lower[tier].unpin(keys)
            health = self._context.health[tier]
            if job.distrusted:  # after a reset in between, the probe says nothing about the tier
                health.drop_probe()
                continue
            read = 0 if job.answer.failed else len(keys) - len(job.answer.bad)
            tokens = job.tokens_by_tier.get(tier, 0) * read // len(keys)
            health.probed(tokens, job.answer.seconds, now, good=read > 0)

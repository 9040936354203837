"""The jobs of a plan that have no result yet, and the jobs that have ended since the last step.

Every job of a plan must get a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.messages.plan import LoadJob, StepPlan
from offload.messages.report import StepReport


class Unanswered:
    """The jobs of a plan that have no answer yet.

    ``loads`` are its loads and parts of loads; the first part answers for the whole load.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.loads = list(plan.loads)
        self.jobs = [
            *(store.job for store in plan.stores),
            *(write_through.job for write_through in plan.write_throughs),
            *(load.job for load in plan.loads if not load.part),
        ]

    def answered(self, job: int) -> None:
        """Record that another part of the executor will answer this job."""
        self.jobs.remove(job)

    def begun(self, load: LoadJob) -> None:
        """Record that this load, or part of a load, has begun; it answers for itself."""
        if not load.part:
            self.jobs.remove(load.job)
        self.loads.remove(load)


@dataclass(slots=True)
class Drained:
    """Everything that ended since the last ``drain``.

    ``finished`` has the requests whose load has ended, including those in ``failed``; ``report``
    has the jobs' results. If a read hangs, a request's load can end before its job.
    """

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)

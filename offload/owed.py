"""What a rank still owes: answers to the jobs of a plan, and to requests that wait for loads."""

from __future__ import annotations

from offload.plans import LoadJob, StepPlan


class Deadlines:
    """By when requests must have been told how their loads ended, whatever the loop does. Belongs
    to the thread that posts. A load of which parts are to come has no deadline yet: it is the
    scheduler's turn, whose steps may take any time."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._partial: set[str] = set()

    def expect(self, load: LoadJob, due: float) -> None:
        """A load, or a part of one, is posted. What comes of a load after it has ended needs no
        end any more, and nobody waits for a probe."""
        request = load.request
        if not request or (load.part and request not in self._partial):
            return
        self._partial.discard(request)
        if load.is_last:
            self._due[request] = due
        else:
            self._partial.add(request)

    def ended(self, request: str) -> bool:
        """A load has ended; whether that was still expected."""
        expected = request in self._partial or request in self._due
        self._partial.discard(request)
        self._due.pop(request, None)
        return expected

    def take_overdue(self, now: float) -> list[str]:
        """Requests whose time is over; they are not expected any more."""
        late = [request for request, due in self._due.items() if due < now]
        for request in late:
            del self._due[request]
        return late


class Unanswered:
    """The jobs and requests of a plan that nobody has taken charge of yet. Loads are answered by
    their first part."""

    def __init__(self, plan: StepPlan) -> None:
        self.jobs = [
            *(store.job for store in plan.stores),
            *(demote.job for demote in plan.demotes),
            *(load.job for load in plan.loads if not load.part),
        ]
        self.requests = [load.request for load in plan.loads if not load.part]
        self.loads = list(plan.loads)

"""The loads of a rank whose end has not been reported to vLLM, with their deadlines.

Every load that a request waits for must end. The GPU blocks of an ended load stay reserved as long
as a copy may still write into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offload.messages.plan import LoadJob
from tiers.copy.base import Ticket


class _Copy:
    """Covers a copy into a request's blocks from before its submission until its end."""

    __slots__ = ("is_refused", "ticket")

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.is_refused = False

    @property
    def has_ended(self) -> bool:
        return self.is_refused or (self.ticket is not None and self.ticket.done())


class OpenLoad:
    """A load whose end has not yet been reported to its request.

    Two threads use this object without a lock. ``submit`` belongs to the loop, which adds a copy
    before it checks whether the load has ended. Everything else belongs to the model-runner thread,
    which ends a load before it checks for copies. The thread that comes second sees what the other
    one did, so no copy begins in blocks that no longer belong to the request.

    ``is_ok`` is ``None`` until the load has ended. ``due`` is the time at which the model-runner
    thread gives it up (monotonic seconds); it is ``None`` while the scheduler still has to send
    parts, because its steps may take any time.
    """

    __slots__ = ("_copies", "due", "is_ok", "request")

    def __init__(self, request: str) -> None:
        self.request = request
        self.due: float | None = None
        self.is_ok: bool | None = None
        self._copies: list[_Copy] = []

    def submit(self, submit: Callable[[], Ticket]) -> Ticket | None:
        """Submit a copy into the request's blocks; ``None`` if the load has ended. Raises whatever
        ``submit`` raises."""
        copy = _Copy()
        self._copies = [one for one in self._copies if not one.has_ended] + [copy]
        if self.is_ok is not None:
            copy.is_refused = True
            return None
        try:
            copy.ticket = submit()
        except BaseException:  # after any failure, nothing waits for this copy
            copy.is_refused = True
            raise
        return copy.ticket

    @property
    def is_copying(self) -> bool:
        """True if a copy may still write into the request's blocks."""
        return not all(copy.has_ended for copy in self._copies)


class OpenLoads:
    """The loads of a rank, for the model-runner thread.

    They are kept ``by_job`` because a request's name may be reused before the first load under that
    name has ended here.
    """

    def __init__(self) -> None:
        self.by_job: dict[int, OpenLoad] = {}

    def __len__(self) -> int:
        return len(self.by_job)

    @property
    def are_stuck(self) -> bool:
        """True if copies of a load that has ended are still under way. Later copies have to wait
        for them."""
        return any(load.is_ok is not None for load in self.by_job.values())

    def expect(self, jobs: Iterable[LoadJob], due: float) -> dict[int, OpenLoad]:
        """Add posted loads, or parts of loads. Returns those that begin.

        A part that arrives after the end of its load is ignored. A probe is not added, because no
        request waits for it.
        """
        begun = {}
        for job in jobs:
            if job.part == 0:
                begun[job.job] = OpenLoad(job.request)
                if job.request:
                    self.by_job[job.job] = begun[job.job]
            if job.is_last and (load := self.by_job.get(job.job)) is not None:
                load.due = due
        return begun

    def end(self, job: int, *, is_ok: bool) -> None:
        """End a load. Only the first call has an effect."""
        load = self.by_job.get(job)
        if load is not None and load.is_ok is None:
            load.is_ok = is_ok

    def fail_all(self) -> None:
        """Fail every load whose end has not been reported; none of their copies begins from now
        on."""
        for load in self.by_job.values():
            if load.is_ok is None:
                load.is_ok = False

    @property
    def is_copying(self) -> bool:
        """True if a copy may still write into blocks of any request."""
        return any(load.is_copying for load in self.by_job.values())

    def give_up_overdue(self, now: float) -> int:
        """Fail the loads that are past their deadline; return their number."""
        late = 0
        for load in self.by_job.values():
            if load.is_ok is None and load.due is not None and load.due < now:
                load.is_ok = False
                late += 1
        return late

    def take_ended(self) -> list[tuple[str, bool]]:
        """Return the requests whose load has ended since the previous call, with whether it
        succeeded.

        A request is held back while a copy into its blocks is still under way, because vLLM reuses
        the blocks as soon as the end is reported.
        """
        ended = [
            (job, load)
            for job, load in self.by_job.items()
            if load.is_ok is not None and not load.is_copying
        ]
        for job, _ in ended:
            del self.by_job[job]
        return [(load.request, bool(load.is_ok)) for _, load in ended]

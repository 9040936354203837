"""The executor: carries out plans on one rank.

Ownership. `accept` and everything below it run on one asyncio loop and own the tasks, the fills
and the tier writers. `post`, `fence` and `drain` belong to the thread that drives vLLM's model
runner (or to the loop itself, in one process) and own `_sources`, `_poisoned`, `_deadlines`
and `_stalled`. Plans cross by ``call_soon_threadsafe``, answers by a deque; there is no lock.

Every job is answered exactly once, also when it failed, hung or could not be understood.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.asker import Asker
from offload.load_task import LoadLane, LoadTask
from offload.owed import Deadlines, Unanswered
from offload.plans import Answer, JobResult, Observed, Question, StepPlan, StepReport, StoreJob
from offload.stats import WorkerStats
from offload.tier_watch import TierWatch
from offload.tier_writer import TierWriter
from tiers.base import Tier
from tiers.copy import CopyBatch, CopyEngine, GroupRegions, Ticket, TransferError
from tiers.slab import HostSlab

if TYPE_CHECKING:
    from offload.verify import Verifier

logger = logging.getLogger(__name__)


STALL_S = 5.0
"""So long after its deadline a load is given up without the loop, which must have stopped."""


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """Bounds of one rank: the longest that a request waits for its load (seconds), the longest
    that a fence may hold up a step (seconds), after how long an operation of a lower tier is
    late (seconds), the most chunks in one read, and the most reads of one tier at a time."""

    load_timeout_s: float = 10.0
    fence_timeout_s: float = 2.0
    tier_timeout_s: float = 5.0
    read_batch: int = 16
    reads_in_flight: int = 4


@dataclass(slots=True)
class Drained:
    """What ended since the last ``drain``: requests whose load is done, the failed ones among
    them, and the jobs' results. A request may end before its job does (a read that hangs)."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    report: StepReport = field(default_factory=StepReport)


class Executor:
    """Runs plans with a copy engine and tiers over one slab.

    ``staging`` are slots of the slab that the planner does not know; chunks that find no slot
    pass through them.
    """

    def __init__(
        self,
        slab: HostSlab,
        engine: CopyEngine,
        groups: Sequence[GroupRegions],
        tiers: Sequence[Tier] = (),
        *,
        staging: Sequence[int] = (),
        limits: ExecutorLimits | None = None,
        rank: int = 0,
        verifier: Verifier | None = None,
    ) -> None:
        self.rank = rank
        self.limits = limits or ExecutorLimits()
        self.stats = verifier.stats if verifier is not None else WorkerStats()
        self._verifier = verifier
        self.degraded = ""
        self._engine = engine
        self._groups = {group.group: group for group in groups}
        self._tiers = tuple(tiers)
        self._seen: deque[tuple[int, Observed]] = deque()
        watches = [
            TierWatch(self.limits.tier_timeout_s, partial(self._see, tier))
            for tier in range(len(self._tiers))
        ]
        self._lane = LoadLane(
            slab,
            engine,
            self._groups,
            self._tiers,
            watches,
            staging,
            self.limits,
            self.stats,
            verifier,
        )
        for number, tier in enumerate(self._tiers):
            tier.on_loss(partial(self._lose, number))
        self._writers = [
            TierWriter(tier, watch, slab, self._groups, self.stats)
            for tier, watch in zip(self._tiers, watches, strict=True)
        ]
        self._asker = Asker(self._tiers, self._writers, self._see)
        self._answers: deque[tuple[int, Answer]] = deque()
        self._results: deque[tuple[int, JobResult]] = deque()
        self._ended: deque[tuple[str, bool]] = deque()
        self._sources: dict[int, Future[None]] = {}
        self._poisoned: set[int] = set()
        self._deadlines = Deadlines()
        self._stalled = False
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_result: Callable[[], None] = lambda: None

    # -- the driver's thread -----------------------------------------------------------------

    def post(self, plan: StepPlan) -> None:
        """Hand over a plan; call after the step's forward pass was submitted. Never waits."""
        if plan.empty or self._loop is None:
            return
        if self._verifier is not None:
            self._verifier.after_step(plan)
        due = time.monotonic() + self.limits.load_timeout_s + STALL_S
        for load in plan.loads:
            self._deadlines.expect(load, due)
        if self._stalled:
            nobody = replace(plan, deletes={}, touches={}, demotes=(), reset=False, epochs={})
            self._refuse(Unanswered(nobody), RuntimeError("the loop does not answer"))
            self._refuse_on_loop(plan)
            plan = replace(plan, loads=(), stores=(), fence=(), questions=())
        try:
            sources: dict[int, Future[None]] = {store.job: Future() for store in plan.stores}
            self._sources |= sources
            after = self._engine.record_event()
            self._loop.call_soon_threadsafe(self.accept, plan, sources, after)
        except Exception as error:  # the plan's jobs must be answered all the same
            for store in plan.stores:
                self._sources.pop(store.job, None)
            self._refuse(Unanswered(plan), error)
            self._refuse_on_loop(plan)

    def _refuse_on_loop(self, plan: StepPlan) -> None:
        """Nobody may join what these loads were to read, nor wait for their parts."""
        if plan.loads and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody does
                self._loop.call_soon_threadsafe(self._lane.refuse, plan.loads)

    def before_step(self, plan: StepPlan) -> None:
        """Call before the step's forward pass, which may overwrite what it does not own."""
        if self._verifier is not None:
            self._verifier.before_step(plan)

    def fence(self, jobs: Sequence[int]) -> None:
        """Wait until these stores have read their GPU blocks, at most ``fence_timeout_s``.

        A store that has not even started by then never will; one that is under way is failed,
        whatever it copies. Either way its slot is never committed.
        """
        deadline = time.monotonic() + self.limits.fence_timeout_s
        for job in jobs:
            source = self._sources.get(job)
            if source is None:
                continue
            try:
                source.result(max(0.0, deadline - time.monotonic()))
            except (FutureTimeoutError, CancelledError):
                self.poison([job])
                self.stats.fence_timeouts += 1

    def poison(self, jobs: Sequence[int]) -> None:
        """Fail these stores, whatever they copy from here on."""
        for job in jobs:
            if job in self._sources:
                self._sources[job].cancel()
                self._poisoned.add(job)

    def drain(self, wait_s: float = 0.0) -> Drained:
        """Everything that ended since the last call; waits for a first result at most
        ``wait_s``, which only an idle engine should ask for."""
        if wait_s > 0.0:
            deadline = time.monotonic() + wait_s
            while not (self._results or self._ended or self._answers):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.0001)
        out = Drained()
        while self._ended:
            request, ok = self._ended.popleft()
            if not self._deadlines.ended(request) and request in self._lane.forsaken:
                continue
            out.finished.add(request)
            if not ok:
                out.failed.add(request)
        self._stalled = self._stalled and not self._results
        while self._results:
            job, result = self._results.popleft()
            if job in self._poisoned:
                self._poisoned.discard(job)
                result = JobResult(failed=True)
            self._sources.pop(job, None)
            out.report.results[job] = result
        self._forsake(out)
        while self._seen:
            tier, seen = self._seen.popleft()
            out.report.see(tier, self.rank, seen)
        while self._answers:
            number, answer = self._answers.popleft()
            out.report.answers[number] = answer
        return out

    def _forsake(self, out: Drained) -> None:
        """End loads that the loop should have ended long ago. Their slots stay taken: nobody knows
        who still writes there."""
        late = self._deadlines.take_overdue(time.monotonic())
        for request in late:
            self._lane.forsaken.add(request)
            out.finished.add(request)
            out.failed.add(request)
        if late:
            self._stalled = True
            self._degrade(f"the loop does not answer; {len(late)} loads were given up")

    # -- the loop ----------------------------------------------------------------------------

    def start(self, on_result: Callable[[], None] | None = None) -> None:
        """Bind to the running loop; ``on_result`` is called there after each answer."""
        self._loop = asyncio.get_running_loop()
        if self._verifier is not None:
            self._verifier.start(self._loop.call_soon_threadsafe)
        if on_result is not None:
            self._on_result = on_result
        for writer in self._writers:
            writer.start(self._answer)

    def accept(
        self,
        plan: StepPlan,
        sources: dict[int, Future[None]],
        after: object | None,
    ) -> None:
        """Start everything in a plan. Order: reset, deletes, stores, demotes, loads."""
        unanswered = Unanswered(plan)
        try:
            self._accept(plan, sources, after, unanswered)
        except Exception as error:  # every job must be answered, whatever went wrong
            self._refuse(unanswered, error)
            self._lane.refuse(unanswered.loads)

    def _accept(
        self,
        plan: StepPlan,
        sources: dict[int, Future[None]],
        after: object | None,
        unanswered: Unanswered,
    ) -> None:
        if plan.reset:
            self._lane.cancel_all()
        for tier, writer in enumerate(self._writers):
            if tier in plan.epochs:
                writer.reset(plan.epochs[tier])
            writer.delete(plan.deletes.get(tier, ()))
        for question in plan.questions:
            self._spawn(self._ask(question))
        for store in plan.stores:
            self._accept_store(store, sources[store.job], after)
            unanswered.jobs.remove(store.job)
        for demote in plan.demotes:
            self._writers[demote.tier].write(demote)
            unanswered.jobs.remove(demote.job)
        for tier, writer in enumerate(self._writers):
            writer.touch(plan.touches.get(tier, ()))
        for load in plan.loads:
            if load.part:
                self._lane.go_on(load)
            else:
                self._spawn(self._run_load(self._lane.open(load, after)))
                unanswered.jobs.remove(load.job)
                unanswered.requests.remove(load.request)
            unanswered.loads.remove(load)

    def _accept_store(self, store: StoreJob, source: Future[None], after: object | None) -> None:
        if self.degraded or not source.set_running_or_notify_cancel():
            self._answer(store.job, JobResult(failed=True))
            return
        try:
            self._lane.overwrite(store.slots)
            batch = CopyBatch(
                store.group,
                np.asarray(store.blocks, dtype=np.int64).reshape(len(store.slots), -1),
                np.asarray(store.slots, dtype=np.int64),
            )
            ticket = self._engine.submit_store([batch], after)
        except Exception as error:  # any fault of the engine must still answer the job
            self._degrade(f"a store could not be submitted: {error!r}")
            source.set_result(None)
            self._answer(store.job, JobResult(failed=True))
            return
        nbytes = len(store.slots) * self._groups[store.group].chunk_bytes
        self._spawn(self._await_store(store.job, ticket, source, nbytes))

    async def _await_store(
        self, job: int, ticket: Ticket, source: Future[None], nbytes: int
    ) -> None:
        started = time.perf_counter()
        result = JobResult()
        try:
            await ticket.completed()
        except TransferError as error:
            if count := self._lane.failed.add("store"):
                logger.warning("kvtiers: %d stores have failed, the last with: %s", count, error)
            result.failed = True
        else:
            if self._verifier is not None:
                await self._verifier.settled()  # whoever finds the chunk finds its digest
            self.stats.store_bytes += nbytes
            self.stats.store_seconds += time.perf_counter() - started
        source.set_result(None)
        self._answer(job, result)

    async def _ask(self, question: Question) -> None:
        self._answers.append((question.number, await self._asker.ask(question)))
        self._on_result()

    async def _run_load(self, task: LoadTask) -> None:
        """Answer the request by the deadline, the job when nobody writes into its slots."""
        body = asyncio.ensure_future(task.run())
        self._tasks.add(body)
        body.add_done_callback(self._tasks.discard)
        timeout_s = self.limits.load_timeout_s
        while not body.done() and (left := task.time_left(timeout_s)) > 0:
            await asyncio.wait({body}, timeout=left)
        if not body.done():
            task.give_up(late=True)
            self.stats.load_timeouts += 1
            await task.copies_ended()
            self._end_request(task.request, ok=False)
            self._answer(task.job, await body)
            return
        result = await body
        # The answer first: whoever sees that the request has ended must find it.
        self._answer(task.job, result)
        self._end_request(task.request, ok=not (result.failed or result.bad))

    def _refuse(self, unanswered: Unanswered, error: Exception) -> None:
        """Fail what nobody has taken charge of."""
        self._degrade(f"a plan could not be carried out: {error!r}")
        for job in unanswered.jobs:
            self._answer(job, JobResult(failed=True))
        for request in unanswered.requests:
            self._end_request(request, ok=False)

    def _end_request(self, request: str, *, ok: bool) -> None:
        if request:  # nobody waits for a probe
            self._ended.append((request, ok))
            self._on_result()

    def _see(self, tier: int, seen: Observed) -> None:
        self._seen.append((tier, seen))
        self._on_result()

    def _lose(self, tier: int) -> None:
        self.stats.lost(tier)
        self._see(tier, Observed(losses=1))

    def _answer(self, job: int, result: JobResult) -> None:
        self._results.append((job, result))
        self._on_result()

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]  # coroutines only
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._degrade(f"a transfer task died: {task.exception()!r}")

    def _degrade(self, why: str) -> None:
        """Stop storing; loads go on as long as they work. One line in the log."""
        if not self.degraded:
            self.degraded = why
            logger.error("kvtiers: offloading is degraded on this rank: %s", why)

    async def settle(self) -> None:
        """Wait until the tiers have done everything that was posted so far."""
        await asyncio.sleep(0)  # a plan that was posted on this loop is accepted first
        await asyncio.gather(*(writer.finish() for writer in self._writers))

    async def aclose(self, timeout_s: float = 2.0) -> None:
        """Give what flies ``timeout_s`` seconds, then let go of tiers and engine."""
        pending = {*self._tasks, *(asyncio.ensure_future(w.finish()) for w in self._writers)}
        if pending:
            pending = (await asyncio.wait(pending, timeout=timeout_s))[1]
        for tier in self._tiers:
            try:
                await asyncio.wait_for(tier.aclose(), timeout_s)
            except Exception as error:  # closing goes on whatever one tier does
                logger.warning("kvtiers: a tier did not close: %r", error)
        for task in {*pending, *self._tasks}:
            task.cancel()
        for writer in self._writers:
            writer.stop()
        await asyncio.sleep(0)  # they begin to end while the loop still runs
        self._engine.close()
        if self._verifier is not None:
            self._verifier.stop()

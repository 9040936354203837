"""The executor: carries out plans on one rank.

Ownership. `accept` and the methods that it calls run on one asyncio loop and own the tasks, the
fills and the tier writers. `post`, `fence` and `drain` belong to the model-runner thread (or to the
loop itself, in one process) and own `_fences` and `_open`. Plans reach the loop by
``call_soon_threadsafe``, and answers return in a deque; there is no lock.

Every job is answered exactly once, even if it fails, hangs or cannot be understood.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.messages.plan import LoadJob, PresenceQuery, StepPlan, StoreJob
from offload.messages.report import JobResult, Observed, PresenceReply, StepReport
from offload.telemetry.counters import WorkerStats
from offload.worker.copy_pause import CopyPause
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.fences import Fences, Reading
from offload.worker.idle_scrub import IdleScrub, ScrubLimits
from offload.worker.loads import LoadTask, RankLoads
from offload.worker.open_loads import OpenLoad, OpenLoads
from offload.worker.presence_queries import PresenceQueries
from offload.worker.rank_health import RankHealth
from offload.worker.rank_memory import RankMemory
from offload.worker.tier_monitor import WatchedTier, close_tier
from offload.worker.tier_writer import TierWriter
from offload.worker.unanswered_jobs import Drained, Unanswered
from policies.safe_text import safe_repr
from tiers.base import Scrubbed, Tier
from tiers.copy.base import CopyBatch, TransferError

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

logger = logging.getLogger(__name__)

LOOP_STALL_S = 5.0
"""A load is given up this long after its deadline even if the loop does not run."""


class Executor:
    """Runs plans over the memory and the tiers of one rank. ``scrubs`` gives the limits of the
    tiers that verify their records while they are idle."""

    def __init__(
        self,
        memory: RankMemory,
        tiers: Sequence[Tier] = (),
        *,
        limits: ExecutorLimits | None = None,
        rank: int = 0,
        verifier: Verifier | None = None,
        scrubs: Mapping[int, ScrubLimits] | None = None,
    ) -> None:
        self.rank = rank
        self.limits = limits or ExecutorLimits()
        self.stats = verifier.stats if verifier is not None else WorkerStats()
        self._verifier = verifier
        self._memory = memory
        self._reported_slots = self.usable_slots
        self._engine = memory.engine
        self._tiers = tuple(tiers)
        self._seen: deque[tuple[int, Observed]] = deque()
        watched = [
            WatchedTier(tier, self.limits.tier_timeout_s, partial(self._add_observed, number))
            for number, tier in enumerate(self._tiers)
        ]
        self._loads = RankLoads(memory, watched, self.limits, self.stats, verifier)
        for number, tier in enumerate(self._tiers):
            tier.on_loss(partial(self._add_loss, number))
        self._writers = [TierWriter(tier, memory, self.stats) for tier in watched]
        self._scrubs = [
            IdleScrub(watched[n], bounds, partial(self._take_scrubbed, n))
            for n, bounds in (scrubs or {}).items()
        ]
        self._presence_queries = PresenceQueries(self._tiers, self._writers, self._add_observed)
        self._answers: deque[tuple[int, PresenceReply]] = deque()
        self._results: deque[tuple[int, JobResult]] = deque()
        self._ended: deque[tuple[int, bool]] = deque()
        self._fences = Fences()
        self._open = OpenLoads()
        self.copy_pause = CopyPause(self._open, self._fences, verifier)
        self._health = RankHealth()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_result: Callable[[], None] = lambda: None

    # -- model-runner thread ---------------------------------------------------------------------

    def post(self, plan: StepPlan, *, refused: str = "") -> None:
        """Pass a plan to the loop, after the step's forward pass was submitted. Never waits.

        ``refused``: the reason why the plan's stores and loads must fail, or an empty string.
        """
        if plan.empty or self._loop is None:
            return
        if self._verifier is not None:
            self._verifier.after_step(plan)
        due = time.monotonic() + self.limits.load_timeout_s + LOOP_STALL_S
        loads = self._open.expect(plan.loads, due) if plan.loads else {}
        try:
            after = self._engine.record_event()
        except Exception as error:  # resets and deletions must not be lost with the copies
            after, refused = None, "the end of the step could not be marked"
            self._degrade(f"{refused}: {error!r}")
        plan = self._admit(plan, refused)
        sources = self._fences.add(plan.stores) if plan.stores else {}
        try:
            self._loop.call_soon_threadsafe(self.accept, plan, sources, loads, after)
        except Exception as error:  # the loop is closed, but the jobs must still be answered
            self._degrade(f"a plan could not be posted: {error!r}")
            self._refuse(Unanswered(plan), sources, self._fail_fills_later)

    def _admit(self, plan: StepPlan, refused: str) -> StepPlan:
        """Refuse the jobs that must not begin now, and return the rest of the plan. Their answers
        do not need the loop, which may be blocked."""
        if self._health.is_stalled:
            why, rest = "the loop does not answer", replace(plan, loads=(), stores=(), queries=())
        elif why := refused or self.copy_pause.reason:
            rest = replace(plan, loads=(), stores=())
        elif plan.loads and self._open.are_stuck:
            why, rest = "copies of earlier loads hang", replace(plan, loads=())
        else:
            return plan
        if count := self._loads.failed.add(why):
            logger.warning("kvtiers: the copies of %d plans were not made because %s", count, why)
        stores = () if rest.stores else plan.stores
        unanswered = Unanswered(StepPlan(loads=plan.loads, stores=stores))
        self._refuse(unanswered, {}, self._fail_fills_later)
        return rest

    def _fail_fills_later(self, loads: Sequence[LoadJob]) -> None:
        """Fail these loads' fills on the loop, before it accepts a later plan."""
        if loads and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no load can join these
                self._loop.call_soon_threadsafe(self._loads.refuse, loads)

    def before_step(self, plan: StepPlan) -> None:
        """Wait for fences; call this before the step's forward pass, which may overwrite blocks
        that stores still read."""
        if self._verifier is not None:
            self._verifier.before_step(plan)

    def fence(self, jobs: Sequence[int]) -> None:
        """Wait until these stores have read their GPU blocks, or until the GPU will make later
        launches wait for them; at most ``fence_timeout_s``.

        A store that has not started by then never starts. A store that is under way fails, even if
        its copy succeeds. In both cases the store's slots are never committed.
        """
        timeout_s = self.limits.fence_timeout_s
        late = self._fences.wait(jobs, timeout_s, self._engine.hold_compute)
        self.stats.fences_timed_out(late)

    def poison(self, jobs: Sequence[int]) -> None:
        """Fail these stores, even if they still copy."""
        self._fences.poison(jobs)

    def drain(self, wait_s: float = 0.0) -> Drained:
        """Return everything that has ended since the previous call.

        Waits for a first result at most ``wait_s``; only an idle engine should pass a time.
        """
        if wait_s > 0.0:
            deadline = time.monotonic() + wait_s
            while not (self._results or self._ended or self._answers):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.0001)
        while self._ended:
            job, is_ok = self._ended.popleft()
            self._open.end(job, is_ok=is_ok)
        results: dict[int, JobResult] = {}
        fenced = self._fences.reading
        while self._results:
            job, result = self._results.popleft()
            results[job] = self._fences.end_store(job, result) if job in fenced else result
        self._watch_loop()
        self.stats.copies_failed(sum(self._engine.failures().values()))
        ended = self._open.take_ended() if self._open.by_job else []
        finished = {request for request, _ in ended} if ended else set()
        failed = {request for request, is_ok in ended if not is_ok} if ended else set()
        answers = dict(self._answers.popleft() for _ in range(len(self._answers)))
        usable: dict[int, int] = {}
        if (slots := self.usable_slots) > self._reported_slots:
            usable[self.rank] = self._reported_slots = slots
        report = StepReport(results, answers=answers, usable=usable)
        while self._seen:
            tier, seen = self._seen.popleft()
            report.add_observed(tier, self.rank, seen)
        return Drained(finished, failed, report)

    @property
    def usable_slots(self) -> int:
        """The number of the planner's slots that copies may use now; see ``HostSlab``."""
        return max(0, self._memory.slab.usable_slots - len(self._memory.staging))

    def _watch_loop(self) -> None:
        """Give up loads whose deadline passed long ago, and check that the loop is still running.

        A blocked loop gets no more copies. The slots of such loads stay reserved, because reads may
        still write into them.
        """
        now = time.monotonic()
        late = self._open.give_up_overdue(now) if self._open.by_job else 0
        if late and self._loop is not None:
            self._health.suspect(self._loop.call_soon_threadsafe, late, now)
        if self._health.degraded:
            self._health.check_loop(now)

    # -- event loop thread -------------------------------------------------------------------------

    def start(self, on_result: Callable[[], None] | None = None) -> None:
        """Bind to the running loop; ``on_result`` is called there after each answer."""
        self._loop = asyncio.get_running_loop()
        if self._verifier is not None:
            self._verifier.start(self._loop.call_soon_threadsafe)
        if on_result is not None:
            self._on_result = on_result
        for writer in self._writers:
            writer.start(self._answer)
        for scrub in self._scrubs:
            scrub.start()

    def accept(
        self,
        plan: StepPlan,
        sources: dict[int, Reading],
        loads: dict[int, OpenLoad],
        after: object | None,
    ) -> None:
        """Carry out a plan in this order: cancelled loads, new epochs, deletes, stores,
        write-throughs, loads."""
        unanswered = Unanswered(plan)
        try:
            self._accept(plan, sources, loads, after, unanswered)
        except Exception as error:  # every job must be answered, whatever the error
            self._degrade(f"a plan could not be carried out: {safe_repr(error)}")
            self._refuse(unanswered, sources, self._loads.refuse)

    def _accept(
        self,
        plan: StepPlan,
        sources: dict[int, Reading],
        loads: dict[int, OpenLoad],
        after: object | None,
        unanswered: Unanswered,
    ) -> None:
        if plan.cancel_loads:
            self._loads.cancel_all()
        for tier, writer in enumerate(self._writers):
            if tier in plan.epochs:
                writer.reset(plan.epochs[tier])
            writer.delete(plan.deletes.get(tier, ()))
        for query in plan.queries:
            self._spawn(self._answer_query(query))
        for store in plan.stores:
            unanswered.answered(store.job)
            self._accept_store(store, sources[store.job], after)
        for write_through in plan.write_throughs:
            self._writers[write_through.tier].write(write_through)
            unanswered.answered(write_through.job)
        for tier, writer in enumerate(self._writers):
            writer.touch(plan.touches.get(tier, ()))
        for load in plan.loads:
            if load.part:
                self._loads.advance(load)
            else:
                task = self._loads.open(load, loads[load.job], after)
                self._spawn(self._run_load(task)).add_done_callback(partial(self._load_ended, task))
            unanswered.begun(load)

    def _accept_store(self, store: StoreJob, source: Reading, after: object | None) -> None:
        """Begin a store, or answer it as failed. Never raises."""
        begins = source.set_running_or_notify_cancel()
        if begins and not self.degraded and self._submit_store(store, source, after):
            return
        if begins:  # no fence must wait for it
            source.set_result(None)
        self._answer(store.job, JobResult(failed=True))

    def _submit_store(self, store: StoreJob, source: Reading, after: object | None) -> bool:
        """Submit a store's copy; False if that fails. After the submission nothing may fail,
        because the copy may read the blocks until its ticket says otherwise."""
        try:
            self._loads.overwrite(store.slots)
            nbytes = len(store.slots) * self._memory.groups[store.group].chunk_bytes
            batch = CopyBatch(
                store.group,
                np.asarray(store.blocks, dtype=np.int64).reshape(len(store.slots), -1),
                np.asarray(store.slots, dtype=np.int64),
            )
            ticket = self._engine.submit_store([batch], after)
        except Exception as error:  # the job must be answered, whatever the engine raises
            self._degrade(f"a store could not be submitted: {error!r}")
            return False
        if ticket.submitted is not None:
            ticket.submitted.add_done_callback(lambda end: source.will_end_at(end.result()))
        ticket.on_done(partial(self._stored, store.job, source, nbytes, time.perf_counter()))
        return True

    def _stored(
        self,
        job: int,
        source: Reading,
        nbytes: int,
        started: float,
        error: TransferError | None,
    ) -> None:
        """Record that a store's copy has succeeded or failed."""
        end = partial(self._end_store, job, source, error)
        if error is not None:
            if count := self._loads.failed.add("store"):
                logger.warning("kvtiers: %d stores have failed, the last with: %s", count, error)
            end()
            return
        self.stats.copied(stored_bytes=nbytes, store_s=time.perf_counter() - started)
        if self._verifier is None:
            end()
        else:  # the digest must be there before the chunk can be loaded
            self._spawn(self._verifier.settled()).add_done_callback(end)

    def _end_store(
        self, job: int, source: Reading, error: TransferError | None, *_task: object
    ) -> None:
        source.set_result(None)
        self._answer(job, JobResult(failed=error is not None))

    async def _answer_query(self, query: PresenceQuery) -> None:
        self._answers.append((query.number, await self._presence_queries.answer(query)))
        self._on_result()

    def abandon_load(self, request: str) -> None:
        """Abandon this request's load: it ends as soon as none of its copies is under way.

        Call this on the loop.
        """
        assert self._loop is not None
        self._loop.call_soon(self._loads.abandon, request)  # after the plan that contains the load

    def _load_ended(self, load: LoadTask, task: asyncio.Future[None]) -> None:
        """End a load whose task was cancelled or has failed.

        When the whole loop is closed, a task may be cancelled before it has begun. The load must
        still be reported as ended, once nothing writes to its request's blocks.
        """
        if task.cancelled() or task.exception() is not None:
            load.give_up()
            self._spawn(self._end_when_free(load))

    async def _end_when_free(self, load: LoadTask) -> None:
        await load.copies_ended()
        self._end_load(load.job, is_ok=False)

    async def _run_load(self, task: LoadTask) -> None:
        """Run a load and send its answer.

        The request gets its answer by its deadline, or as soon as the load is abandoned; the job
        gets its answer when its slots are no longer written to.
        """
        body = asyncio.ensure_future(task.run())
        self._tasks.add(body)
        body.add_done_callback(self._tasks.discard)
        await task.wait_in_time(body, self.limits.load_timeout_s)
        if not body.done():
            if not task.abandoned.done():
                task.give_up(late=True)
            await task.copies_ended()
            self._end_load(task.job, is_ok=False)
            self._answer(task.job, await body)
            return
        result = await body
        # First the job: a caller that sees the end of the request must find the job's result.
        self._answer(task.job, result)
        self._end_load(task.job, is_ok=not (result.failed or result.bad))

    def _refuse(
        self,
        unanswered: Unanswered,
        sources: Mapping[int, Reading],
        fail_fills: Callable[[Sequence[LoadJob]], object],
    ) -> None:
        """Fail the jobs that nothing else will answer; runs on either thread. None of their stores
        has begun, and no fence waits for ``sources``, the readings of these stores. ``fail_fills``
        fails the fills of their loads, so that no other load joins them or waits for their
        parts."""
        for job in unanswered.jobs:
            if job in sources and sources[job].set_running_or_notify_cancel():
                sources[job].set_result(None)
            self._answer(job, JobResult(failed=True))
        for load in unanswered.loads:
            if not load.part:
                self._end_load(load.job, is_ok=False)
        fail_fills(unanswered.loads)

    def _end_load(self, job: int, *, is_ok: bool) -> None:
        """Report the end of a load to its request, if a request waits for it."""
        self._ended.append((job, is_ok))
        self._on_result()

    def _add_observed(self, tier: int, seen: Observed) -> None:
        self._seen.append((tier, seen))
        self._on_result()

    def _take_scrubbed(self, tier: int, found: Scrubbed) -> None:
        self.stats.scrubbed(tier, found.records, found.payload_bytes, len(found.damaged))
        if found.damaged:
            text = "kvtiers: tier %d: %d damaged records found and removed"
            logger.warning(text, tier, len(found.damaged))
            self._add_observed(tier, Observed(damaged=frozenset(found.damaged)))

    def _add_loss(self, tier: int) -> None:
        self.stats.lost(tier)
        self._add_observed(tier, Observed(losses=1))

    def _answer(self, job: int, result: JobResult) -> None:
        self._results.append((job, result))
        self._on_result()

    def _spawn(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]  # coroutines only
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._degrade(f"a transfer task failed: {safe_repr(task.exception())}")

    @property
    def degraded(self) -> str:
        """The reason why this rank does not store at present; empty if it stores."""
        return self._health.degraded

    def _degrade(self, why: str) -> None:
        self._health.degrade(why, time.monotonic())

    @property
    def has_pending_epochs(self) -> bool:
        """True if a tier has not begun the epoch that was posted for it last."""
        return any(writer.is_behind for writer in self._writers)

    async def settle(self) -> None:
        """Wait until the tiers have done everything that was posted so far."""
        await asyncio.sleep(0)  # let the loop accept a plan that was posted on it
        await asyncio.gather(*(writer.finish() for writer in self._writers))

    async def aclose(self, timeout_s: float = 2.0) -> None:
        """Wait up to ``timeout_s`` seconds for jobs in flight, then close the tiers and the engine.

        When this returns, no copy is under way any more. If this was cancelled, call it again.
        """
        for scrub in self._scrubs:
            scrub.stop()
        finishing = [asyncio.ensure_future(writer.finish()) for writer in self._writers]
        try:
            if pending := {*self._tasks, *finishing}:
                await asyncio.wait(pending, timeout=timeout_s)
            for tier in self._tiers:
                await close_tier(tier, timeout_s)
        finally:
            for finish in finishing:
                finish.cancel()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.stop()
        self._engine.close()
        if self._tasks:  # these tasks must end while the loop still runs
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        if self._verifier is not None:
            self._verifier.stop()

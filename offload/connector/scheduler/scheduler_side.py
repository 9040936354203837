"""The connector in vLLM's scheduler process: turns requests and block tables into plans.

Runs on vLLM's scheduler thread, never waits, and owns all decision state. It exists once all
workers have reported their tiers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.connector.guard import Faults
from offload.connector.model.adapters import Loaded
from offload.connector.scheduler.block_tables import BlockTables, ChunkBatches
from offload.connector.scheduler.chunk_digests import ChunkDigests
from offload.connector.scheduler.finished_requests import FinishedRequests
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.live_requests import LiveRequests
from offload.connector.scheduler.old_kv import OldKv
from offload.connector.scheduler.other_loads import OtherLoads
from offload.connector.scheduler.prefill_rate import PrefillRate
from offload.connector.scheduler.store_progress import StoreProgress
from offload.connector.scheduler.uncomputed_blocks import UncomputedBlocks
from offload.connector.scheduler.unfinished_loads import UnfinishedLoads
from offload.connector.scheduler.waiting_requests import WaitingRequests
from offload.connector.scheduler.wrong_kv import WrongKv, WrongKvCauses
from offload.index.chunk_batch import ChunkBatch
from offload.layout.groups import ModelLayout
from offload.layout.keys import CPU
from offload.layout.prefix_match import PrefixMatcher
from offload.messages.plan import StepPlan
from offload.messages.report import StepReport
from offload.planner.jobs import LoadTokens
from offload.planner.look_ahead.ahead_use import NOT_READ_AHEAD
from offload.planner.look_ahead.read_waits import Action
from offload.planner.planner import Planner
from offload.planner.step_budget import EXPIRED_MAX
from offload.requests.lookup import Lookups
from offload.requests.request_log import RequestLog
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

STALL_S = 5.0
"""If work makes no progress for this long, it neither keeps an idle engine stepping nor delays a
shutdown."""


class SchedulerSide:
    """Does lookups, plans and progress tracking for one engine.

    Callers use the ``planner``, the ``requests``, the ``lookups`` and their ``log`` directly, and
    call ``uncomputed.remove`` and ``old_kv.step`` before ``build_plan``, ``old_kv.ended`` before
    ``finished``, and ``old_kv.reset`` at each reset.
    ``is_held`` means that lookups and stores are suspended. ``namespace_differences``: see
    ``offload.requests.miss_reasons.Explainer``.
    ``wrong_kv`` says why vLLM may continue requests from wrong KV.
    """

    def __init__(
        self,
        layout: ModelLayout,
        planner: Planner,
        requests: LiveRequests,
        faults: Faults,
        *,
        log: RequestLog | None = None,
        gpu_cache: GpuCache | None = None,
        namespace_differences: Sequence[str] = (),
        max_pinned_share: float = 0.25,
        verify: bool = False,
        by_priority: bool = False,
        wrong_kv: WrongKvCauses | None = None,
    ) -> None:
        self.layout = layout
        self.planner = planner
        self.requests = requests
        self.log = log or RequestLog()
        self.is_held = False
        self._faults = faults
        self._unfinished_loads = UnfinishedLoads()
        self._prefill_rate = PrefillRate(planner.health.computed)
        self._progress_at = time.monotonic()
        self._tables = BlockTables(layout)
        self._other_loads = OtherLoads(self._tables)
        matcher = PrefixMatcher(layout)
        self._batches = ChunkBatches(layout, matcher)
        self._digests = ChunkDigests(layout, self._batches) if verify else None
        self._wrong_kv = WrongKv(layout, wrong_kv or WrongKvCauses())
        self._store_progress = StoreProgress(
            layout, matcher, self._batches, planner, self._wrong_kv, self._digests
        )
        self._finished_requests = FinishedRequests(layout, planner, max_pinned_share)
        gpu_cache = gpu_cache or GpuCache()
        self._by_priority = by_priority
        self.uncomputed = UncomputedBlocks(layout, requests, gpu_cache)
        self.old_kv = OldKv(layout, requests, gpu_cache)
        computing = self._prefill_rate.left_tokens
        self.lookups = Lookups(matcher, planner, self.log, namespace_differences, computing)
        self._waiting_requests = WaitingRequests(
            planner,
            self.lookups,
            gpu_cache,
            computing,
            [group.block_tokens for group in layout.groups],
            by_priority=by_priority,
        )

    # -- requests ----------------------------------------------------------------------------

    def admit(self, request: Request) -> RequestState | None:
        """Return the state of a request, which may be new. ``None`` means that a later step must
        admit it, because the content of its adapter may be known by then."""
        live = self.requests.by_name.get(request.request_id)
        if live is None:
            live = self.requests.admit(request)
            if live is None:
                return None
            self._store_progress.begin(live.state)
            self._wrong_kv.begin(live.state, request)
            self._waiting_requests.add(live.state, request)
        return live.state

    def _state(self, request: Request) -> RequestState:
        state = self.admit(request)
        assert state is not None, f"{request.request_id} runs before its adapter is loaded"
        return state

    def lookup(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens beyond ``computed_tokens`` can be loaded now, or ``None`` if vLLM
        must ask again later.

        Does not change the tiers.

        A request whose load has failed is not loaded again but computed (docs/decisions/0003). It
        first waits for the loads that are open: vLLM schedules waiting requests in order and stops
        at the first one without blocks, and requests behind this one may hold the blocks. A second
        load could wait forever, because vLLM reserves the request's blocks against itself, too.
        """
        self.old_kv.begins(request)
        state = self.admit(request)
        if state is None:
            return None
        self._unfinished_loads.ended(request.request_id)
        self._other_loads.asked(request.request_id, computed_tokens)
        if state.outcome.failures:
            return (
                None
                if self._unfinished_loads.must_wait(request.request_id, time.monotonic())
                else 0
            )
        if self.is_held:
            return 0
        action = self._next_action(state, request)
        if action is Action.WAIT:
            state.lookup.begin(computed_tokens, time.perf_counter())
            return None
        return self.lookups.look_up(state, request, computed_tokens, action.shorten_reason)

    def _next_action(self, state: RequestState, request: Request) -> Action:
        try:
            return self._waiting_requests.decide(state, request, time.monotonic())
        except Exception as error:  # must not cost the request its hit
            self._faults.note("look_ahead", error)
            return Action.BEGIN

    def allocated(
        self, request: Request, block_ids: tuple[list[int], ...], external_tokens: int
    ) -> None:
        """Plan a load if ``external_tokens`` > 0; vLLM has allocated its blocks."""
        name = request.request_id
        self.old_kv.allocated(request, external_tokens)
        self._other_loads.allocated(request, block_ids, external_tokens)
        if external_tokens <= 0:
            self._unfinished_loads.forget(name)
            self._end_wait(request)  # before its entry in the log is final
            state = self._state(request)
            self._note_accepted(state, request, external_tokens)
            if not state.outcome.has_first_token:
                computed = max(request.num_computed_tokens, state.lookup.start)
                self._prefill_rate.accepted(request, computed)
            return
        self._unfinished_loads.begin(name)
        try:
            state = self._state(request)
            self._note_accepted(state, request, external_tokens)
            load = self._plan_load(state, block_ids, external_tokens)
        except Exception:
            # The request now waits for a load, so that load must end. A fence may be missing.
            self.planner.stores.distrust()
            self.planner.loads.plan_failed(name)
            if name in self.requests.by_name:  # until the result, nothing is in its blocks
                self.requests.by_name[name].state.outcome.begin_load(LoadTokens())
            raise
        self._end_wait(request, load)

    def _end_wait(self, request: Request, load: Sequence[ChunkBatch] = ()) -> None:
        """Handle a request that no longer waits, because ``load`` was planned for it."""
        try:
            ahead = self._waiting_requests.remove(request.request_id, time.monotonic(), load)
            if ahead is not NOT_READ_AHEAD:
                live = self.requests.by_name.get(request.request_id)
                if live is not None:
                    live.state.lookup.note_read_ahead(ahead)
        except Exception as error:  # must not fail the load, nor the end of the request
            self._faults.note("look_ahead", error)

    def _note_accepted(self, state: RequestState, request: Request, external_tokens: int) -> None:
        try:
            self.lookups.accepted(state, request, external_tokens)
        except Exception as error:  # a failure to write the log must not fail the load
            self._faults.note("explain", error)

    def _plan_load(
        self, state: RequestState, block_ids: tuple[list[int], ...], external_tokens: int
    ) -> list[ChunkBatch]:
        start = state.lookup.start
        end = start + external_tokens
        self.planner.stores.fence(self._tables.beyond(block_ids, start))
        chunks = self.lookups.load_ranges(state, end)
        load = self._batches.of_load(state.identity, block_ids, chunks, range(start, end))
        state.outcome.begin_load(self.planner.loads.plan(state.identity.request, load))
        self._store_progress.load_planned(state, chunks)
        self._progress_at = time.monotonic()
        return load

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Store the missing chunks of a request that ends; vLLM is about to free its blocks.

        Returns the report to the client, if the client sent controls or hints.
        """
        state = self.requests.end(request.request_id)
        self._unfinished_loads.forget(request.request_id)
        filled_tokens = self._other_loads.end(request.request_id)
        self._prefill_rate.ended(request, time.monotonic())
        self._end_wait(request)
        self._wrong_kv.ended(request.request_id)
        if state is None:
            return None
        self.lookups.forget(state)
        if state.outcome.loading:
            self.planner.loads.cancel(request.request_id)
        pinned_tokens = 0
        if not state.outcome.loading and block_ids and not self.is_held:
            limit = min(request.num_computed_tokens, request.num_tokens)
            if state.lookup.is_promised:  # vLLM has counted the hit, but the load has not begun
                limit = min(limit, state.lookup.start)
            limit = min(limit, filled_tokens)
            if self._digests is not None:
                right = self._wrong_kv.right_tokens(state, request, limit)
                self._digests.completed(state, request, right, block_ids, ended=True)
            self._store_progress.ended(state, request, limit, block_ids)
            pinned_tokens = self._finished_requests.ended(state, request, limit, time.monotonic())
        if not state.identity.client_asked:
            return None
        return self._finished_requests.report(state, pinned_tokens)

    def hit_sources(self, request: Request, external_tokens: int) -> tuple[int, int]:
        """The number of loaded tokens that come from the CPU tier and from lower tiers."""
        live = self.requests.by_name.get(request.request_id)
        if live is None:
            return external_tokens, 0
        by_tier = live.state.outcome.tokens_by_tier
        below = sum(tokens for tier, tokens in by_tier.items() if tier != CPU)
        below = min(below, external_tokens)
        return external_tokens - below, below

    # -- steps -------------------------------------------------------------------------------

    def before_preemption(self) -> None:
        """Prepare for vLLM to preempt a request, perhaps one that it has already scheduled in this
        step."""
        if self._by_priority:
            self.uncomputed.before_preemption()

    def build_plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan with all work for the workers in this step."""
        idle = output.total_num_scheduled_tokens == 0
        try:
            self._finished_requests.advance()
            self.lookups.advance()
            if not self.is_held:
                self._waiting_requests.advance(time.monotonic())
        except Exception as error:  # even after an error, the step's plan must be sent
            self._faults.note("lookup", error)
        try:
            self._prepare(output)
            digests = self._digests.take() if self._digests is not None else ()
            plan = self.planner.step(idle=idle)  # last, because what it contains must be sent
            return replace(plan, digests=digests) if digests else plan
        except Exception as error:  # the loads and fences of this step must still be sent
            self._faults.note("build_connector_meta", error)
            self.planner.stores.distrust()
            return self.planner.step(idle=idle, write_through=False)

    def _prepare(self, output: SchedulerOutput) -> None:
        now = time.monotonic()
        self._prefill_rate.step_begins()
        self.planner.tick(now)
        self._finished_requests.pins.tick(now, EXPIRED_MAX)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id, is_scheduled=request_id in output.num_scheduled_tokens)
        # Find the fences first: a store planned below reads blocks that belong to this step.
        self.planner.stores.fence(self._tables.rewritten(output))
        self.planner.stores.give_up(self._other_loads.take(output))
        self._wrong_kv.step(output)
        if self._digests is not None:
            self._digest_completed(self._digests, output)
        if self.is_held:
            return
        if self.planner.stores.late_stores.chunks:
            self.planner.stores.plan_late()
        self._store_boundary_states(output)
        by_name = self.requests.by_name
        for request_id, scheduled in output.num_scheduled_tokens.items():
            live = by_name.get(request_id)
            if live is None:
                continue
            # Most requests decode inside a chunk in most steps, so there is nothing to do for them.
            state, request = live.state, live.request
            if not state.outcome.has_first_token and self._prefill_rate.scheduled(request, now):
                state.outcome.note_first_token()
            if request.num_computed_tokens + scheduled >= state.stores.ready_at:
                self._store_progress.scheduled(output, state, request, scheduled)

    def _preempted(self, request_id: str, *, is_scheduled: bool) -> None:
        """Handle a preempted request. Unless it runs again in this step, it waits, but runs before
        others do."""
        live = self.requests.by_name.get(request_id)
        if live is not None:
            self._wrong_kv.begin(live.state, live.request)
            live.state.restart()
            # a load planned in this step has ended the wait
            if not is_scheduled and not live.state.outcome.loading:
                self._waiting_requests.add(live.state, live.request, preempted=True)
        if self._digests is not None:
            self._digests.restarted(request_id)

    def _store_boundary_states(self, output: SchedulerOutput) -> None:
        blocks = output.kv_connector_block_state
        if blocks is None:
            return
        for request_id, offers in blocks.boundary_state_offloads.items():
            live = self.requests.by_name.get(request_id)
            if live is not None:
                self._store_progress.boundary_state(live.state, live.request, offers)

    def _digest_completed(self, digests: ChunkDigests, output: SchedulerOutput) -> None:
        digests.rewritten(self._tables.rewritten(output))
        blocks = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            live = self.requests.by_name.get(request_id)
            if live is None or blocks is None:
                continue
            request = live.request
            limit = min(request.num_computed_tokens + scheduled, request.num_tokens)
            limit = self._wrong_kv.right_tokens(live.state, request, limit)
            table = blocks.get_block_ids(request_id)
            if table is not None:
                digests.completed(live.state, request, limit, table)

    def load_failed_elsewhere(self) -> None:
        """Record that another connector could not fill some blocks of the step that has ended:
        stores of that step may have read them."""
        self.planner.stores.distrust()

    def adapters_loaded(self, loaded: Loaded) -> None:
        """Record that the workers have loaded adapters. Chunks that are being stored now may belong
        to the old or the new content of an adapter that has changed."""
        if self.requests.adapters_loaded(loaded):
            self.planner.stores.distrust()

    def update(
        self, report: StepReport | None, finished: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Process the results of the workers. Their jobs end even if something else here fails."""
        now = time.monotonic()
        if report is None or report.empty:
            report = None
        elif report.results or report.answers:
            self._progress_at = now
        try:
            ended, failures = self._note_loads(finished, failed)
            for request_id in finished:
                self.planner.loads.request_ended(request_id)
            if report is not None:
                self.planner.tick(now)
        finally:  # otherwise these jobs would stay open
            if report is not None:
                self.planner.complete(report)
        self.lookups.ended(ended, failures)

    def _note_loads(
        self, finished: Iterable[str], failed: Iterable[str]
    ) -> tuple[list[RequestState], list[RequestState]]:
        """Record in the states of requests that their loads have ended or failed; return these
        states."""
        by_name = self.requests.by_name
        ended = [by_name[name].state for name in finished if name in by_name]
        for state in ended:
            state.outcome.end_load()
        failures = []
        for request_id in failed:
            if self._other_loads.is_open(request_id):  # another connector's load, not ours
                continue
            logger.warning(
                ("kvtiers: the load of request %s failed; vLLM recomputes its prompt"), request_id
            )
            if request_id in by_name:
                state = by_name[request_id].state
                state.outcome.fail_load()
                self._store_progress.load_failed(state)
                failures.append(state)
        return ended, failures

    # -- the engine --------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """True if the workers have unfinished work that makes progress."""
        if self._finished_requests.all_reported and not self.planner.busy:
            self._progress_at = time.monotonic()
            return False
        return time.monotonic() - max(self._progress_at, self._store_progress.planned_at) < STALL_S

    def hold(self) -> None:
        """Suspend lookups and stores until ``release`` or ``forget``, because the weights may have
        changed. Cancel stores that were planned but not sent: their blocks have lost their content.
        Open loads fail, and reading ahead ends for the requests that wait now."""
        self.is_held = True
        self.planner.stores.cancel_planned()
        self.planner.fail_loads()
        self.planner.look_ahead.forget_all()  # until release, all are computed
        if self._digests is not None:
            self._digests.clear()

    def release(self) -> None:
        """Resume lookups and stores: the weights are the same."""
        self.is_held = False
        self._waiting_requests.match_again()

    def forget(self) -> None:
        """Forget everything, because the weights have changed: no chunk stored so far may be hit
        again, and nothing is written to lower tiers before ``planner.begin_epochs``. If this fails,
        lookups and stores stay suspended until ``forget_chunks`` succeeds."""
        self.is_held = True
        self.requests.adapters.forget()
        self.forget_chunks()

    def forget_chunks(self) -> None:
        """Complete ``forget``, perhaps at a later step. Adapters keep what was noted about them
        since ``forget``: vLLM's own cache has not been reset again."""
        self.planner.forget_all()
        self._waiting_requests.match_again()
        self._finished_requests.clear()
        if self._digests is not None:
            self._digests.clear()
        self.is_held = False

    def close(self) -> None:
        """Close the records, because the server stops."""
        self.requests.close()
        self.log.close()

    def client_pinned(self) -> dict[str, int]:
        """The space that clients have pinned in each tier, in the tier's units."""
        return self._finished_requests.pins.used()

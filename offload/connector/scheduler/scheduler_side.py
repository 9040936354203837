"""The connector in vLLM's scheduler process: from requests and block tables to plans.

Runs on vLLM's scheduler thread, waits for nothing and owns all decision state. Until the
workers have said what they have (``attach``) everything is a miss.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.connector.guard import Faults
from offload.connector.model.adapters import AdapterBook, Loaded
from offload.connector.scheduler.block_tables import BlockTables, WantedChunks
from offload.connector.scheduler.chunk_digests import ChunkDigests
from offload.connector.scheduler.finished_requests import FinishedRequests
from offload.connector.scheduler.new_requests import NewRequests
from offload.connector.scheduler.open_loads import UnfinishedLoads
from offload.connector.scheduler.prefill_rate import PrefillRate
from offload.layout.groups import FULL, STATE, ModelLayout
from offload.layout.keys import CPU
from offload.layout.prefix_match import PrefixMatcher, find_gap, present_in
from offload.messages.plan import StepPlan
from offload.messages.report import StepReport
from offload.planner.planner import Planner
from offload.planner.step_budget import (
    EXPIRED_MAX,
    LOOK_AGAIN_MAX,
    LOOK_AT_END_MAX,
    STEP_CHUNKS,
)
from offload.requests.lookup import Lookups
from offload.requests.miss_reasons import RequestLog
from offload.requests.request_state import RequestState
from offload.requests.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

STALL_S = 5.0
"""Work that has not moved for this long does not keep an idle engine stepping, nor a shutdown
waiting."""


class SchedulerSide:
    """Looks up, plans and tracks for one engine."""

    def __init__(
        self,
        layout: ModelLayout,
        adapters: AdapterBook,
        faults: Faults,
        *,
        require_salt: bool = False,
        recorder: TraceRecorder | None = None,
        tiers: Sequence[str] = (),
        max_pinned_share: float = 0.25,
        log: RequestLog | None = None,
        verify: bool = False,
    ) -> None:
        self.layout = layout
        self.planner: Planner | None = None
        self.adapters = adapters
        self._faults = faults
        self.intake = NewRequests(
            layout, adapters, require_salt=require_salt, recorder=recorder, tiers=tiers
        )
        self.log = log or RequestLog()
        self.lookups: Lookups | None = None
        self.unit_bytes: Mapping[str, int] = {}
        self._endings: FinishedRequests | None = None
        self._max_pinned_share = max_pinned_share
        self._matcher = PrefixMatcher(layout)
        self._wanted = WantedChunks(layout, self._matcher)
        self._tables = BlockTables(layout)
        self._digests = ChunkDigests(layout, self._wanted) if verify else None
        paced = [(n, g) for n, g in enumerate(layout.groups) if g.kind != STATE]
        self._chunk_tokens = [(n, group.chunk_tokens) for n, group in paced]
        self._trackers: dict[str, RequestState] = {}
        self._requests: dict[str, Request] = {}
        self._unseen = UnfinishedLoads()
        self._moved_at = time.monotonic()
        self._clock = PrefillRate(self._computed)

    def attach(self, planner: Planner, foreign: Sequence[str] = ()) -> None:
        """The workers are ready: start to plan. ``foreign``: see
        ``offload.requests.miss_reasons.Explainer``."""
        self.planner = planner
        self._endings = FinishedRequests(self.layout, planner, self._max_pinned_share)
        self.lookups = Lookups(self._matcher, planner, self.log, foreign)

    # -- requests ----------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request was added (also called again for a resumed session)."""
        if request.request_id not in self._trackers:
            tracker = self.intake.admit(request)
            if tracker is None:  # its lookup asks again
                return
            self._trackers[request.request_id] = tracker
            tracker.ready_at = self._ready_at(tracker)
            tracker.mark = self.planner.removals.count if self.planner is not None else 0
            self._requests[request.request_id] = request

    def close(self) -> None:
        """The server stops."""
        self.intake.close()
        self.log.close()

    def lookup(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens beyond ``computed_tokens`` that can be loaded now; ``None``: ask again later. No
        side effect on tiers.

        A request whose load failed computes. vLLM reserves the blocks of its whole prompt for it
        until then, from itself too, so that a second load may wait for ever; and it would stop
        looking at the requests behind this one, which hold the blocks of ended loads: these go
        first.
        """
        self.on_new_request(request)
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return None
        self._unseen.seen(request.request_id)
        if tracker.failures:
            return None if self._unseen.must_wait(request.request_id, time.monotonic()) else 0
        if self.lookups is None:
            return 0
        return self.lookups.ask(tracker, request, computed_tokens)

    def allocated(
        self, request: Request, block_ids: tuple[list[int], ...], external_tokens: int
    ) -> None:
        """vLLM has allocated blocks; ``external_tokens`` > 0 means: load them now."""
        self._unseen.forget(request.request_id)
        if self.planner is None:
            return
        self._explain(request)
        if external_tokens <= 0:
            return
        self._unseen.begin(request.request_id)
        try:
            self._plan_load(self._tracker(request), block_ids, external_tokens)
        except Exception:
            # The request waits for a load now: it must get an answer. And whatever was about to
            # be fenced was not.
            self.planner.stores.distrust()
            self.planner.loads.plan_failed(request.request_id)
            raise

    def _explain(self, request: Request) -> None:
        try:
            if self.lookups is not None:
                self.lookups.accepted(self._tracker(request), request)
        except Exception as error:  # a record that fails must not cost the load
            self._faults.note("explain", error)

    def _plan_load(
        self, tracker: RequestState, block_ids: tuple[list[int], ...], external_tokens: int
    ) -> None:
        assert self.planner is not None
        start = tracker.lookup_start
        self.planner.stores.fence(self._tables.beyond(block_ids, start))
        wanted = self._wanted.of_range(tracker, block_ids, start, start + external_tokens)
        tracker.sources = self.planner.loads.plan(tracker.request, wanted)
        tracker.loaded = self._matcher.load_ranges(start, start + external_tokens)
        tracker.loading = True
        self._moved_at = time.monotonic()

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request ends and its blocks are about to be freed: store what is still missing.
        Returns what the client is told, if it has told us something."""
        tracker = self._trackers.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)
        self._unseen.forget(request.request_id)
        self.adapters.end(request.request_id)
        self._clock.ended(request, time.monotonic())
        if tracker is None or not (self.planner and self.lookups and self._endings):
            return None
        self.lookups.given_up(tracker)
        if tracker.loading:
            self.planner.loads.cancel(request.request_id)
        if not tracker.loading and block_ids:
            limit = min(request.num_computed_tokens, request.num_tokens)
            if self._digests is not None:
                self._digests.completed(tracker, request, limit, block_ids, ended=True)
            self._look_again(tracker)
            self._store_ready(tracker, request, limit, block_ids, ended=True)
            self._endings.ended(tracker, request, limit, time.monotonic())
        return self._endings.report(tracker) if tracker.told else None

    def _look_again(self, tracker: RequestState) -> None:
        """Chunks may have been evicted while their request ran, which counts as their use only
        now. Store them again from the GPU: what comes behind a hole can never be hit."""
        assert self.planner is not None
        if self.planner.removals.count == tracker.mark:
            return
        present = present_in(*self.planner.sources.holders())
        for index, group in enumerate(self.layout.groups):
            done = tracker.keys[index][: tracker.next_chunk[index]]
            hole = find_gap(present, done, LOOK_AGAIN_MAX) if group.kind == FULL else None
            if hole is not None:
                tracker.next_chunk[index] = hole
                tracker.loaded = ()

    def sources(self, request: Request, external_tokens: int) -> tuple[int, int]:
        """How many of the loaded tokens come from the CPU tier and from lower tiers."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return external_tokens, 0
        below = sum(tokens for tier, tokens in tracker.sources.items() if tier != CPU)
        below = min(below, external_tokens)
        return external_tokens - below, below

    # -- steps -------------------------------------------------------------------------------

    def build_plan(self, output: SchedulerOutput) -> StepPlan:
        """Everything the workers have to do because of this step."""
        idle = output.total_num_scheduled_tokens == 0
        if self.planner is None:
            return StepPlan()
        if self.lookups and self._endings:
            try:
                self._endings.go_on()
                self.lookups.go_on()
            except Exception as error:  # the step's plan must go out
                self._faults.note("lookup", error)
        try:
            self._prepare(output)
            plan = self.planner.step(idle=idle)
            if self._digests is not None:
                return replace(plan, digests=self._digests.take())
            return plan
        except Exception as error:  # loads and fences of this step must go out all the same
            self._faults.note("build_connector_meta", error)
            self.planner.stores.distrust()
            return self.planner.step(idle=idle, write_through=False)

    def _prepare(self, output: SchedulerOutput) -> None:
        assert self.planner is not None
        assert self._endings is not None
        now = time.monotonic()
        self.planner.tick(now)
        self._endings.pins.tick(now, EXPIRED_MAX)
        for request_id in output.preempted_req_ids or ():
            if request_id in self._trackers:
                self._trackers[request_id].restart()
            if self._digests is not None:
                self._digests.restarted(request_id)
        # Fences first: a store planned below reads blocks that are this step's own.
        self.planner.stores.fence(self._tables.rewritten(output))
        if self._digests is not None:
            self._digest_completed(self._digests, output)
        self._store_boundary_states(output)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            # Most requests of most steps decode in the midst of a chunk: nothing to do for them.
            request = self._requests[request_id]
            if not tracker.has_answered:
                tracker.has_answered = self._clock.scheduled(request, now)
            if request.num_computed_tokens + scheduled >= tracker.ready_at:
                self._store_scheduled(output, tracker, request, scheduled)

    def _digest_completed(self, digests: ChunkDigests, output: SchedulerOutput) -> None:
        digests.rewritten(self._tables.rewritten(output))
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None or state is None:
                continue
            request = self._requests[request_id]
            limit = min(request.num_computed_tokens + scheduled, request.num_tokens)
            table = state.get_block_ids(request_id)
            if table is not None:
                digests.completed(tracker, request, limit, table)

    def _computed(self, tokens: int, seconds: float) -> None:
        if self.planner is not None:
            self.planner.health.computed(tokens, seconds)

    def _store_scheduled(
        self, output: SchedulerOutput, tracker: RequestState, request: Request, scheduled: int
    ) -> None:
        # Known tokens only: what is sampled or drafted in this step may still be rejected.
        limit = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if limit >= tracker.ready_at:
            state = output.kv_connector_block_state
            table = state.get_block_ids(request.request_id) if state is not None else None
            if table is not None:
                self._store_ready(tracker, request, limit, table)
        tracker.ready_at = self._ready_at(tracker)

    def _ready_at(self, tracker: RequestState) -> int:
        """Where the first chunk ends that is not stored. States are handed over elsewhere."""
        ends = [(tracker.next_chunk[at] + 1) * tokens for at, tokens in self._chunk_tokens]
        return min(ends) if ends else sys.maxsize

    def _store_ready(
        self,
        tracker: RequestState,
        request: Request,
        limit: int,
        block_ids: Sequence[Sequence[int]],
        *,
        ended: bool = False,
    ) -> None:
        """Plan to store the chunks whose content is final once ``limit`` tokens are computed.

        A draft model may still rewrite the last slots of its newest block until the request ends.
        """
        if tracker.no_store or tracker.stale or self.planner is None:
            return
        tracker.extend(request.block_hashes)
        for index, group in enumerate(self.layout.groups):
            if group.kind == STATE:
                continue  # states are handed over at their boundary
            settled_tokens = limit if ended or not group.draft else limit - group.block_tokens
            end = min(max(0, settled_tokens) // group.chunk_tokens, len(tracker.keys[index]))
            self._store_up_to(tracker, index, end, block_ids[group.group], ended=ended)

    def _store_up_to(
        self, tracker: RequestState, index: int, end: int, table: Sequence[int], *, ended: bool
    ) -> None:
        """As many chunks of one group as one step takes; not what was loaded."""
        assert self.planner is not None
        most = LOOK_AT_END_MAX if ended else STEP_CHUNKS * self.planner.budget.times
        size = self.layout.groups[index].chunk_tokens
        loaded = tracker.loaded[index] if tracker.loaded else range(0)
        if ended and end - tracker.next_chunk[index] > most:  # what was computed comes first
            cached = min(end, tracker.lookup_start // size)
            tracker.next_chunk[index] = max(tracker.next_chunk[index], cached)
        seen = 0
        while (first := tracker.next_chunk[index]) < end and seen < most:
            if first in loaded:
                tracker.next_chunk[index] = loaded.stop
                continue
            last = min(end, first + (STEP_CHUNKS // 2 if ended else self.planner.stores.piece))
            last = min(last, loaded.start) if first < loaded.start else last
            seen += last - first
            run = self._wanted.final(tracker, index, first, last, table)
            tracker.next_chunk[index] = last
            if not run:
                continue
            self._moved_at = time.monotonic()
            refused = run.depths[self.planner.stores.plan(run, ended=ended) :]
            if refused:
                tracker.next_chunk[index] = max(first, refused[0] // size - 1)
                return

    def _store_boundary_states(self, output: SchedulerOutput) -> None:
        """Store the recurrent states that vLLM hands over exactly: (group, block, tokens)."""
        state = output.kv_connector_block_state
        if state is None or self.planner is None:
            return
        index_of = {group.group: index for index, group in enumerate(self.layout.groups)}
        for request_id, offers in state.boundary_state_offloads.items():
            tracker, request = self._trackers.get(request_id), self._requests.get(request_id)
            if tracker is None or request is None or tracker.no_store or tracker.stale:
                continue
            tracker.extend(request.block_hashes)
            for group_id, block, tokens in offers:
                index = index_of.get(group_id)
                if index is None or block == 0:
                    continue
                group = self.layout.groups[index]
                chunk, rest = divmod(tokens, group.chunk_tokens)
                known = rest == 0 and 0 < chunk <= len(tracker.keys[index])
                if known and self._matcher.reachable(group, chunk - 1):
                    last = range(chunk - 1, chunk)
                    run = self._wanted.chunks(tracker, index, last, (block,))
                    if self._digests is not None:
                        self._digests.state(tracker, index, chunk - 1, run)
                    self.planner.stores.plan(run)

    def adapters_loaded(self, loaded: Loaded) -> None:
        """The workers have loaded adapters. Where that has changed what an adapter holds, its
        requests leave, and what is being stored may be of either."""
        users = self.adapters.take(loaded)
        if users and self.planner is not None:
            self.planner.stores.distrust()
        for tracker in filter(None, map(self._trackers.get, users)):
            tracker.no_load = tracker.no_store = True
            tracker.filtered_by = "adapter"

    def update(
        self, report: StepReport | None, finished: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Take in what the workers have done."""
        if self.planner is None or self.lookups is None:
            return
        ended = [self._trackers[name] for name in finished if name in self._trackers]
        for tracker in ended:
            tracker.loading = False
        for request_id in finished:
            self.planner.loads.request_ended(request_id)
        failures = []
        for request_id in failed:
            logger.warning("kvtiers: the load of request %s failed; it is recomputed", request_id)
            if request_id in self._trackers:
                failures.append(self._trackers[request_id])
                failures[-1].failures += 1
                failures[-1].loaded = ()
        if report is not None and not report.empty:
            if report.results or report.answers:
                self._moved_at = time.monotonic()
            self.planner.tick(time.monotonic())
            self.planner.complete(report)
        self.lookups.ended(ended, failures)

    def _tracker(self, request: Request) -> RequestState:
        self.on_new_request(request)
        return self._trackers[request.request_id]

    # -- the engine's life -------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether workers have something to finish and are getting on with it."""
        is_told = self._endings is None or self._endings.are_told
        if self.planner is None or (is_told and not self.planner.busy):
            self._moved_at = time.monotonic()
            return False
        return time.monotonic() - self._moved_at < STALL_S

    def begin_epochs(self, epochs: Mapping[int, int]) -> None:
        """These new epochs of lower tiers are durable: workers may write under them."""
        if self.planner is not None:
            self.planner.begin_epochs(epochs)

    def forget(self) -> None:
        """The weights changed: nothing stored so far may be hit again, and nothing is written to
        lower tiers before ``begin_epochs``."""
        self.adapters.forget()
        if self.planner is not None:
            self.planner.forget_all()
        if self._endings is not None:
            self._endings.clear()
        if self._digests is not None:
            self._digests.clear()
        for request_id, tracker in self._trackers.items():
            # What these requests have computed belongs to the old weights, until they restart.
            tracker.stale = self._requests[request_id].num_computed_tokens > 0

    def kept(self) -> dict[str, int]:
        """What clients have kept of each tier, in units of its space."""
        return self._endings.pins.used() if self._endings is not None else {}

"""Informs look-ahead about the requests that wait for vLLM to run them, and about the chunks that
they will load. Decides which of them wait for their reads although vLLM could run them.

Part of the scheduler side, on its thread. Requests are matched with vLLM's own cache and with the
tiers in the order in which they will run, as long as the step's allowance for lookups lasts. A
request is matched once more when it is among the next to run, because chunks may have been evicted
or stored meanwhile. A step without waiting requests costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from offload.connector.scheduler.gpu_cache import GpuCache
from offload.index.chunk_batch import ChunkBatch
from offload.layout.keys import CPU
from offload.planner.look_ahead.ahead_use import NOT_READ_AHEAD, AheadUse
from offload.planner.look_ahead.read_waits import Action, BlockDemand
from offload.planner.planner import Planner
from offload.planner.presence import PendingLookup
from offload.planner.step_budget import MATCHED_AGAIN_REQUESTS_MAX, MATCHED_REQUESTS_MAX
from offload.requests.lookup import Lookups
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A waiting request and its position in the order.

    ``is_due`` means that it must be matched, ``is_matched`` that it was matched before, and
    ``is_next`` that it has been among the next requests to run. ``cached`` and ``queries`` belong
    to the match that is due and are ``None`` at first: the number of the request's tokens in vLLM's
    own cache, and the queries to shared tiers.
    """

    state: RequestState
    request: Request
    order: tuple[Any, ...]
    cached: int | None = None
    queries: PendingLookup | None = None
    is_due: bool = False
    is_matched: bool = False
    is_next: bool = False


_order_of = attrgetter("order")


def _remove(ordered: list[_WaitingRequest], waiting: _WaitingRequest) -> None:
    del ordered[bisect_left(ordered, waiting.order, key=_order_of)]


class WaitingRequests:
    """The waiting requests. They run in the order in which they arrived or, ``by_priority``, in
    vLLM's order of priorities. ``block_tokens`` contains each group's tokens per block;
    ``computing`` counts the tokens that vLLM computes before it begins with another request.
    Without look-ahead, there are none.
    """

    def __init__(
        self,
        planner: Planner,
        lookups: Lookups,
        gpu_cache: GpuCache,
        computing: Callable[[], int],
        block_tokens: Sequence[int],
        *,
        by_priority: bool = False,
    ) -> None:
        self._planner = planner
        self._lookups = lookups
        self._gpu_cache = gpu_cache
        self._computing = computing
        self._block_tokens = block_tokens
        self._by_priority = by_priority
        self._is_on = planner.look_ahead.is_on
        self._waiting: dict[str, _WaitingRequest] = {}
        self._queue: list[_WaitingRequest] = []  # in the order in which they will run
        self._due: list[_WaitingRequest] = []  # in the same order
        self._names: set[str] = set()
        self._count = 0

    def add(self, state: RequestState, request: Request, *, preempted: bool = False) -> None:
        """Add a request that waits from now on. A preempted request runs next."""
        if not self._is_on:
            return
        self._names.add(request.request_id)
        if preempted:
            self._planner.read_waits.exempt(request.request_id)
        read = state.identity.origin.controls.read
        if state.identity.no_load or (read is not None and CPU not in read):
            return
        self._drop(request.request_id)
        self._planner.look_ahead.leave(request.request_id)
        self._count += 1
        position = -self._count if preempted else self._count
        order: tuple[Any, ...] = (position,)
        if self._by_priority:
            order = (request.priority, request.arrival_time, self._count)
        waiting = self._waiting[request.request_id] = _WaitingRequest(state, request, order)
        insort(self._queue, waiting, key=_order_of)
        self._set_due(waiting)

    def remove(self, request: str, now: float, load: Sequence[ChunkBatch] = ()) -> AheadUse:
        """Remove a request that no longer waits: this ``load`` was planned for it, or it runs or
        has ended. Returns what look-ahead did for it."""
        if not self._is_on:
            return NOT_READ_AHEAD
        self._drop(request)
        self._names.discard(request)
        self._planner.read_waits.leave(request, now)
        return self._planner.look_ahead.leave(request, load)

    def _drop(self, request: str) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            _remove(self._queue, waiting)
            if waiting.is_due:
                _remove(self._due, waiting)

    def match_again(self) -> None:
        """Match all requests as if they had just arrived: look-ahead has forgotten them."""
        for waiting in self._queue:
            waiting.is_matched = waiting.is_next = False
            waiting.cached = waiting.queries = None
            waiting.state.lookup.known.clear()  # updating it may take longer than a new lookup
            self._set_due(waiting)

    def _set_due(self, waiting: _WaitingRequest) -> None:
        if not waiting.is_due:
            waiting.is_due, waiting.cached, waiting.queries = True, None, None
            insort(self._due, waiting, key=_order_of)

    def decide(self, state: RequestState, request: Request, now: float) -> Action:
        """Decide what a request does that vLLM could run now."""
        waits, name = self._planner.read_waits, request.request_id
        if not waits.is_on:
            return Action.BEGIN
        waiting = self._waiting.get(name)
        if waiting is not None and not waiting.is_matched:
            self.advance(now)
            if not waiting.is_matched:
                return Action.BEGIN  # its lookup probably takes another step, too
        needed = sum(-(-request.num_tokens // tokens) for tokens in self._block_tokens)
        blocks = BlockDemand(self._gpu_cache.free_blocks(), needed, len(self._names) - 1)
        action = waits.decide(name, now, blocks, self._computing)
        state.lookup.set_waited_s(waits.waited_s(name))
        return action

    def advance(self, now: float) -> None:
        """Match the requests that run first, as far as the step allows."""
        if not self._queue:
            return
        for waiting in self._queue[:MATCHED_AGAIN_REQUESTS_MAX]:
            if not waiting.is_next:
                waiting.is_next = True
                self._set_due(waiting)
        allowance = self._planner.budget.lookups
        for waiting in self._due[:MATCHED_REQUESTS_MAX]:
            if allowance.left <= 0:
                return
            _remove(self._due, waiting)  # a request that fails here is not tried again
            waiting.is_due = False
            if self._match(waiting, now):
                waiting.is_matched = True
            else:
                waiting.is_due = True
                insort(self._due, waiting, key=_order_of)

    def _match(self, waiting: _WaitingRequest, now: float) -> bool:
        """Look for the chunks of a request; returns False if this must be repeated."""
        state, request = waiting.state, waiting.request
        if state.identity.no_load or state.outcome.failures:
            return True
        if waiting.cached is None:
            waiting.cached = self._gpu_cache.cached_tokens(request)
            if waiting.cached is None:
                return True
            self._planner.budget.lookups.take(waiting.cached // min(self._block_tokens))
        if self._planner.presence.tiers and self._may_learn_more(waiting, waiting.cached, now):
            return False
        batches = self._lookups.ahead(state, request, waiting.cached)
        if batches is None:
            return False
        self._planner.look_ahead.enter(request.request_id, waiting.order, batches)
        return True

    def _may_learn_more(self, waiting: _WaitingRequest, cached: int, now: float) -> bool:
        """True if shared tiers may soon say which of a request's chunks they hold."""
        state, request = waiting.state, waiting.request
        if waiting.queries is None:
            waiting.queries = self._lookups.query_ahead(state, request, cached, now)
        return self._planner.presence.may_be_answered(waiting.queries, now)

"""Informs look-ahead about the requests that wait for vLLM to run them, and about the chunks that
they will load. Decides which of them wait for their reads although vLLM could run them.

Part of the scheduler side, on its thread. Each request is matched once with vLLM's own cache and
with the tiers, in a step whose allowance for lookups is not used up. A step without waiting
requests costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from offload.index.chunk_batch import ChunkBatch
from offload.layout.keys import CPU
from offload.planner.look_ahead import AheadUse
from offload.planner.planner import Planner
from offload.planner.read_waits import Action, BlockDemand
from offload.planner.step_budget import MATCHED_MAX
from offload.requests.lookup import Lookups
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _Unmatched:
    """A request that has not been matched yet, and its position in the order. ``cached`` is the
    number of its tokens in vLLM's own cache, once this is known."""

    state: RequestState
    request: Request
    order: tuple[Any, ...]
    cached: int | None = None


class WaitingRequests:
    """The waiting requests. They run in the order in which they arrived or, ``by_priority``, in
    vLLM's order of priorities. ``cached_tokens`` returns how many tokens of a request vLLM's own
    cache holds, or ``None`` if nothing may be read ahead for this request. ``free_blocks`` counts
    the free blocks of the GPU; ``block_tokens`` has the tokens of a block of each group.
    ``computing`` counts the tokens that vLLM computes before it begins with another request.
    """

    def __init__(
        self,
        planner: Planner,
        lookups: Lookups,
        cached_tokens: Callable[[Request], int | None],
        free_blocks: Callable[[], int],
        computing: Callable[[], int],
        block_tokens: Sequence[int],
        *,
        by_priority: bool = False,
    ) -> None:
        self._planner = planner
        self._lookups = lookups
        self._cached_tokens = cached_tokens
        self._free_blocks = free_blocks
        self._computing = computing
        self._block_tokens = block_tokens
        self._by_priority = by_priority
        self._unmatched: dict[str, _Unmatched] = {}
        self._names: set[str] = set()
        self._count = 0

    def add(self, state: RequestState, request: Request, *, preempted: bool = False) -> None:
        """Add a request that waits from now on. A preempted request runs next."""
        self._names.add(request.request_id)
        if preempted:
            self._planner.read_waits.begin(request.request_id)
        read = state.identity.origin.controls.read
        if state.identity.no_load or (read is not None and CPU not in read):
            return
        self._count += 1
        place = -self._count if preempted else self._count
        order: tuple[Any, ...] = (place,)
        if self._by_priority:
            order = (request.priority, request.arrival_time, self._count)
        self._unmatched[request.request_id] = _Unmatched(state, request, order)

    def remove(self, request: str, now: float, load: Sequence[ChunkBatch] = ()) -> AheadUse:
        """Remove a request that no longer waits: this ``load`` was planned for it, or it runs or
        has ended. Returns what look-ahead did for it."""
        self._unmatched.pop(request, None)
        self._names.discard(request)
        self._planner.read_waits.leave(request, now)
        return self._planner.look_ahead.leave(request, load)

    def ask(self, state: RequestState, request: Request, now: float) -> Action:
        """Decide what a request does that vLLM could run now."""
        waits, name = self._planner.read_waits, request.request_id
        if not waits.is_on:
            return Action.BEGIN
        if name in self._unmatched:
            self.advance()
        if name in self._unmatched:
            return Action.BEGIN  # its lookup probably takes another step, too
        needed = sum(-(-request.num_tokens // tokens) for tokens in self._block_tokens)
        blocks = BlockDemand(self._free_blocks(), needed, len(self._names) - 1)
        action = waits.ask(name, now, blocks, self._computing)
        state.lookup.waited(waits.waited_s(name))
        return action

    def advance(self) -> None:
        """Match requests that have arrived, as far as the step allows."""
        allowance = self._planner.budget.lookups
        for name in list(islice(self._unmatched, MATCHED_MAX)):
            if allowance.left <= 0:
                return
            waiting = self._unmatched.pop(name)  # a request that fails here is not tried again
            if not self._match(name, waiting):
                self._unmatched[name] = waiting

    def _match(self, name: str, waiting: _Unmatched) -> bool:
        """Look for the chunks of a request; returns False if this must be repeated."""
        state = waiting.state
        if state.identity.no_load or state.outcome.failures:
            return True
        if waiting.cached is None:
            waiting.cached = self._cached_tokens(waiting.request)
            if waiting.cached is None:
                return True
            self._planner.budget.lookups.take(waiting.cached // min(self._block_tokens))
        runs = self._lookups.ahead(state, waiting.request, waiting.cached)
        if runs:
            self._planner.look_ahead.enter(name, waiting.order, runs)
        return runs is not None

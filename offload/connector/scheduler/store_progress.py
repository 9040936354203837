"""Plans the stores of live requests as their chunks are computed.

Part of the scheduler side, on its thread. The scheduler side owns it. Only this module and
`offload.connector.scheduler.wrong_kv` change a `StoreState`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.connector.scheduler.block_tables import ChunkBatches
from offload.connector.scheduler.chunk_digests import ChunkDigests
from offload.connector.scheduler.wrong_kv import WrongKv
from offload.layout.groups import FULL, STATE, ModelLayout
from offload.layout.prefix_match import PrefixMatcher, find_gap, present_in
from offload.planner.planner import Planner
from offload.planner.step_budget import LOOK_AGAIN_MAX, LOOK_AT_END_MAX, STORE_PIECE_MAX
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StoreProgress:
    """Tracks how far each request is computed and plans stores of its complete chunks.

    ``planned_at`` is the time at which the last store was planned (monotonic seconds). ``digests``
    receives the recurrent states that are handed over, if verification is on.
    """

    def __init__(
        self,
        layout: ModelLayout,
        matcher: PrefixMatcher,
        batches: ChunkBatches,
        planner: Planner,
        wrong_kv: WrongKv,
        digests: ChunkDigests | None = None,
    ) -> None:
        self.planned_at = time.monotonic()
        self._layout = layout
        self._matcher = matcher
        self._batches = batches
        self._planner = planner
        self._wrong_kv = wrong_kv
        self._digests = digests
        self._index_of = {group.group: index for index, group in enumerate(layout.groups)}
        paced = [(n, group) for n, group in enumerate(layout.groups) if group.kind != STATE]
        self._needs_head = any(group.kind == FULL for group in layout.groups)
        self._chunk_tokens = [(n, group.chunk_tokens) for n, group in paced]
        self._first_end = min((tokens for _, tokens in self._chunk_tokens), default=sys.maxsize)

    def begin(self, state: RequestState) -> None:
        """Begin to follow a request."""
        own = self._planner.stores.own_chunks() if self._needs_head else None
        state.stores.begin(self._first_end, self._planner.removals.count, own)

    def load_planned(self, state: RequestState, chunks: Sequence[range]) -> None:
        """Record that these chunks of each group are being loaded and need no store."""
        state.stores.note_loaded(chunks)

    def load_failed(self, state: RequestState) -> None:
        """Record that the load has failed: vLLM will compute its chunks."""
        state.stores.note_loaded(())

    def scheduled(
        self, output: SchedulerOutput, state: RequestState, request: Request, scheduled: int
    ) -> None:
        """Plan stores of the chunks that this step may complete by computing ``scheduled``
        tokens."""
        # Count known tokens only: tokens that are sampled or drafted in this step may still be
        # rejected.
        limit = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if limit >= state.stores.ready_at:
            blocks = output.kv_connector_block_state
            table = blocks.get_block_ids(request.request_id) if blocks is not None else None
            if table is not None:
                self._store_ready(state, request, limit, table)
        state.stores.set_ready_at(self._ready_at(state))

    def ended(
        self,
        state: RequestState,
        request: Request,
        limit: int,
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Store the missing chunks of a request that ends after ``limit`` tokens."""
        self._look_again(state)
        self._store_ready(state, request, limit, block_ids, ended=True)

    def boundary_state(
        self, state: RequestState, request: Request, offers: Sequence[tuple[int, int, int]]
    ) -> None:
        """Store recurrent states that vLLM hands over at an exact boundary: (group, block,
        tokens)."""
        if state.identity.no_store or state.stores.stale:
            return
        state.identity.extend(request.block_hashes)
        for group_id, block, tokens in offers:
            index = self._index_of.get(group_id)
            if index is None or block == 0:
                continue
            group = self._layout.groups[index]
            chunk, rest = divmod(tokens, group.chunk_tokens)
            known = rest == 0 and 0 < chunk <= len(state.identity.keys[index])
            known = known and self._wrong_kv.right_tokens(state, request, tokens) == tokens
            if known and self._matcher.reachable(group, chunk - 1):
                last = range(chunk - 1, chunk)
                batch = self._batches.of_chunks(state.identity, index, last, (block,))
                if self._digests is not None:
                    self._digests.boundary_state(state, index, chunk - 1, batch)
                self._planner.stores.plan(batch)

    def _ready_at(self, state: RequestState) -> int:
        """The end, in tokens, of the first chunk that is not stored. Recurrent states do not count,
        because vLLM hands them over at their boundary."""
        next_chunk = state.stores.next_chunk
        ends = [(next_chunk[at] + 1) * tokens for at, tokens in self._chunk_tokens]
        first = min(ends, default=sys.maxsize)
        return first if first <= state.stores.right_tokens else sys.maxsize

    def _look_again(self, state: RequestState) -> None:
        """Check stored chunks again: some of them may have been evicted while their request ran.

        The request's use of its chunks is counted only at its end. Evicted chunks are stored again
        from the GPU, because chunks after a gap can never be hit.
        """
        stores = state.stores
        if self._planner.removals.count == stores.removal_mark:
            return
        present = present_in(*self._planner.sources.holders())
        for index, group in enumerate(self._layout.groups):
            done = state.identity.keys[index][: stores.next_chunk[index]]
            gap = find_gap(present, done, LOOK_AGAIN_MAX) if group.kind == FULL else None
            if gap is not None:
                stores.continue_at(index, gap)
                stores.note_loaded(())
                if stores.own is not None:
                    stores.own.discard(done[gap:])

    def _store_ready(
        self,
        state: RequestState,
        request: Request,
        limit: int,
        block_ids: Sequence[Sequence[int]],
        *,
        ended: bool = False,
    ) -> None:
        """Plan to store the chunks whose content is final once ``limit`` tokens are computed.

        A draft model may still rewrite the last slots of its newest block until the request ends.
        """
        if state.identity.no_store or state.stores.stale:
            return
        state.identity.extend(request.block_hashes)
        limit = self._wrong_kv.right_tokens(state, request, limit)
        for index, group in enumerate(self._layout.groups):
            if group.kind == STATE:
                continue
            final_tokens = limit if ended or not group.draft else limit - group.block_tokens
            keys = state.identity.keys[index]
            end = min(max(0, final_tokens) // group.chunk_tokens, len(keys))
            table = block_ids[group.group]
            self._store_up_to(state, index, end, table, ended=ended)
            first = state.stores.next_chunk[index]
            if ended and first < end:
                end = min(end, first + LOOK_AT_END_MAX)
                rest = self._batches.of_final(state.identity, index, first, end, table)
                self._planner.stores.late_stores.add(rest, state.stores.own)

    def _store_up_to(
        self, state: RequestState, index: int, end: int, table: Sequence[int], *, ended: bool
    ) -> None:
        """Plan as many chunks of one group as one step allows, except those that were loaded."""
        stores = state.stores
        chunks_max = self._planner.budget.store_look_max(ended=ended)
        size = self._layout.groups[index].chunk_tokens
        loaded = stores.loaded[index] if stores.loaded else range(0)
        if ended and end - stores.next_chunk[index] > chunks_max:  # computed chunks come first
            cached = min(end, state.lookup.start // size)
            stores.continue_at(index, max(stores.next_chunk[index], cached))
        seen = 0
        while (first := stores.next_chunk[index]) < end and seen < chunks_max:
            if first in loaded:
                stores.continue_at(index, loaded.stop)
                if stores.own is not None:
                    stores.own.add(state.identity.keys[index][first : loaded.stop])
                continue
            piece = STORE_PIECE_MAX if ended else self._planner.stores.piece
            last = min(end, first + piece)
            last = min(last, loaded.start) if first < loaded.start else last
            seen += last - first
            batch = self._batches.of_final(state.identity, index, first, last, table)
            stores.continue_at(index, last)
            if not batch:
                continue
            self.planned_at = time.monotonic()
            may_wait = self._planner.stores.may_wait(end - first)
            settled = self._planner.stores.plan(batch, stores.own, ended=ended, may_wait=may_wait)
            refused = batch.depths[settled:]
            if refused:
                stores.continue_at(index, max(first, refused[0] // size - 1))
                return

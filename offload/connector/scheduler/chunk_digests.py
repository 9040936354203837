"""Selects the chunks that workers digest in a step, for ``"verify": "device"``
(`offload.worker.block_verifier`).

Every chunk that a request completes is digested, whether or not it is stored. So verification does
not depend on the planner's decisions about stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from offload.connector.scheduler.block_tables import ChunkBatches
from offload.index.chunk_batch import ChunkBatch
from offload.layout.groups import STATE, ModelLayout
from offload.messages.plan import DigestJob
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ChunkDigests:
    """Collects the digests of the coming step. Runs on the scheduler's thread."""

    def __init__(self, layout: ModelLayout, batches: ChunkBatches) -> None:
        self._layout = layout
        self._batches = batches
        self._next: dict[str, list[int]] = {}  # by request: the first open chunk of each group
        self._late: list[DigestJob] = []
        self._early: list[DigestJob] = []

    def take(self) -> tuple[DigestJob, ...]:
        """Return the chunks to digest in this step."""
        taken = (*self._early, *self._late)
        self._early, self._late = [], []
        return taken

    def completed(
        self,
        state: RequestState,
        request: Request,
        limit: int,
        tables: Sequence[Sequence[int]],
        *,
        ended: bool = False,
    ) -> None:
        """Add the chunks that this step completes by computing the request up to ``limit`` tokens.

        ``ended`` means that the request has ended, and that an earlier step has computed these
        chunks. Chunks from before its first step came from vLLM's cache or from a tier, and were
        digested when they were computed.
        """
        if state.stores.stale:
            self.restarted(state.identity.request)
            return
        state.identity.extend(request.block_hashes)
        first = self._next.pop(state.identity.request, None)
        if first is None:
            if ended:
                return
            computed = request.num_computed_tokens
            first = [computed // group.chunk_tokens for group in self._layout.groups]
        if not ended:
            self._next[state.identity.request] = first
        for index, group in enumerate(self._layout.groups):
            if group.kind == STATE:
                continue  # recurrent states are handed over at their boundary
            settled = limit if ended or not group.draft else limit - group.block_tokens
            end = min(max(0, settled) // group.chunk_tokens, len(state.identity.keys[index]))
            if end > first[index]:
                table = tables[group.group]
                batch = self._batches.of_final(state.identity, index, first[index], end, table)
                self._add(batch, early=ended)
                first[index] = end

    def boundary_state(
        self, state: RequestState, index: int, chunk: int, batch: ChunkBatch
    ) -> None:
        """Add the recurrent state that this step handed over at the end of this chunk.

        It ignores the state with which the request started, because this engine did not compute it.
        """
        first = self._next.get(state.identity.request)
        if first is not None and chunk >= first[index]:
            self._add(batch, early=False)
            first[index] = chunk + 1

    def _add(self, batch: ChunkBatch, *, early: bool) -> None:
        if batch:
            jobs = self._early if early else self._late
            jobs.append(DigestJob(batch.group, tuple(batch.keys), tuple(batch.blocks), early))

    def restarted(self, request: str) -> None:
        """Forget a request that was preempted or has ended, because its chunks may change."""
        self._next.pop(request, None)

    def rewritten(self, blocks: Iterable[int]) -> None:
        """Drop these blocks, because the coming step overwrites them.

        It can overwrite them before the workers get the plan, so their old content can no longer be
        digested.
        """
        gone = set(blocks)
        self._early = [job for job in self._early if gone.isdisjoint(job.blocks)]

    def clear(self) -> None:
        """Forget everything, because the weights have changed."""
        self._early, self._late = [], []

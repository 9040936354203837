"""Finds sessions (streamed input) that vLLM may continue from wrong KV, so that no tier keeps it.

Part of the scheduler side, on its thread. vLLM computes the rest of such a session from KV that
does not belong to its tokens, and offers the blocks to later requests in its own cache. All of this
ends with the server; a tier would keep it.

The block hash of the first token that may be wrong marks all of it: only requests with this hash
can have hit these blocks. No request stores anything from a marked hash on, not even one that has
computed all of it again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.connector.compat import COUNTS_DRAFTS_AFTER_STOP
from offload.layout.groups import STATE, ModelLayout
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class WrongKvCauses:
    """Why vLLM continues a session from wrong KV in this server.

    * ``states``: the model has recurrent states. When vLLM drops the last token of a session, a
      step in flight has already added this token to the state.
    * ``drafts_after_stop``: accepted drafts that come after a session's stop count as computed.
    """

    states: bool = False
    drafts_after_stop: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig, layout: ModelLayout) -> WrongKvCauses:
        """The causes in a server with this configuration."""
        has_drafts = vllm_config.speculative_config is not None
        has_states = any(group.kind == STATE for group in layout.groups)
        is_synchronous = not vllm_config.scheduler_config.async_scheduling
        return cls(
            states=has_states,
            drafts_after_stop=COUNTS_DRAFTS_AFTER_STOP and has_drafts and is_synchronous,
        )


@dataclass(slots=True)
class _Followed:
    """A session, which may be continued from wrong KV.

    Its prompt had ``prompt_tokens`` when it was looked at last. When its last step was scheduled,
    ``known_tokens`` were known, and ``end`` is the token at which this step ends if all its drafts
    are accepted; both are 0 before the first step. From ``wrong_from`` on, tokens may be wrong.
    """

    state: RequestState
    request: Request
    prompt_tokens: int
    known_tokens: int = 0
    end: int = 0
    wrong_from: int = sys.maxsize


class WrongKv:
    """Marks the KV that may be wrong.

    vLLM's cache has as many blocks as the layout. A marked hash that has not been used while twice
    as many were marked can no longer be in it, and is forgotten.
    """

    def __init__(self, layout: ModelLayout, causes: WrongKvCauses) -> None:
        self._causes = causes
        self._hash_tokens = layout.hash_tokens
        self._marked_max = 2 * layout.num_blocks
        self._marked: dict[bytes, None] = {}  # in the order of their last use
        self._followed: dict[str, _Followed] = {}

    def begin(self, state: RequestState, request: Request) -> None:
        """Record that a request holds no KV: it has just arrived or was preempted."""
        followed = self._followed.pop(request.request_id, None)
        if followed is not None:
            self._mark_wrong(followed)
        if request.resumable and (self._causes.states or self._causes.drafts_after_stop):
            prompt_tokens = request.num_prompt_tokens
            self._followed[request.request_id] = _Followed(state, request, prompt_tokens)

    def step(self, output: SchedulerOutput) -> None:
        """Process a step before its stores are planned."""
        for name, followed in self._followed.items():
            self._look(followed)
            scheduled = output.num_scheduled_tokens.get(name, 0)
            if scheduled:
                followed.known_tokens = followed.request.num_tokens
                followed.end = followed.request.num_computed_tokens + scheduled

    def ended(self, request_id: str) -> None:
        """Process the end of a request before its last stores are planned."""
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._look(followed)

    def right_tokens(self, state: RequestState, request: Request, tokens: int) -> int:
        """The number of the first ``tokens`` tokens of a request that may be stored."""
        stores = state.stores
        if self._marked:
            hashes, first = request.block_hashes, stores.hashes_checked
            end = min(tokens // self._hash_tokens, len(hashes))
            if not self._marked.keys().isdisjoint(hashes[first:end]):
                at = next(at for at in range(first, end) if hashes[at] in self._marked)
                self._mark(hashes[at])
                stores.end_at(at * self._hash_tokens)
            stores.note_checked(end)
        return min(tokens, stores.right_tokens)

    def _look(self, followed: _Followed) -> None:
        """Find out whether a session was continued, and whether from wrong KV."""
        request = followed.request
        if request.num_prompt_tokens != followed.prompt_tokens:
            first = max(self._first_wrong(followed), followed.prompt_tokens)
            followed.wrong_from = min(followed.wrong_from, first)
            followed.prompt_tokens = request.num_prompt_tokens
        self._mark_wrong(followed)

    def _mark_wrong(self, followed: _Followed) -> None:
        """Mark what may be wrong in a request, once its hash is known."""
        if followed.wrong_from < sys.maxsize:
            hashes = followed.request.block_hashes
            at = followed.wrong_from // self._hash_tokens
            followed.state.stores.end_at(at * self._hash_tokens)
            if at < len(hashes):
                self._mark(hashes[at])

    def _first_wrong(self, followed: _Followed) -> int:
        """The first token that may be wrong in a session that was just continued."""
        continued_at, causes = followed.request.num_computed_tokens, self._causes
        found = sys.maxsize
        if followed.end == 0:
            return found
        if causes.states and followed.end > continued_at:
            found = continued_at
        # At least one token of the last step was kept. vLLM counts its accepted drafts as computed.
        if causes.drafts_after_stop and continued_at > followed.known_tokens + 1:
            found = min(found, followed.known_tokens + 1)
        return found

    def _mark(self, block_hash: bytes) -> None:
        self._marked.pop(block_hash, None)
        self._marked[block_hash] = None
        if len(self._marked) > self._marked_max:
            del self._marked[next(iter(self._marked))]

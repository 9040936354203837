"""Completes a request after the stores of its last chunks were planned.

Completing a request means: report the use of its chunks to the policies, pin the chunks if the
client requested that, and report to the client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.layout.groups import FULL, ModelLayout
from offload.layout.request_keys import RequestKeys
from offload.planner.planner import Planner
from offload.planner.timed_pins import TimedPins
from offload.requests.parse_options import REPORT
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.request import Request


UNREPORTED_MAX = 256
"""Number of uses that may wait for their keys; beyond that, the oldest are dropped without
notifying the policies."""


@dataclass(frozen=True, slots=True)
class _UnreportedUse:
    """A request that has ended and has used the first ``count`` of these keys."""

    keys: RequestKeys
    count: int
    hints: Mapping[str, Any]


NOT_STORED = "an ignored parameter may have been meant to keep this request from being stored"


class FinishedRequests:
    """Handles the finished requests of one planner.

    ``max_pinned_share`` of each tier may be pinned for clients.
    """

    def __init__(self, layout: ModelLayout, planner: Planner, max_pinned_share: float) -> None:
        self.pins = TimedPins(planner.cpu, planner.lower, planner.groups, max_pinned_share)
        self._layout = layout
        self._planner = planner
        self._unreported: deque[_UnreportedUse] = deque(maxlen=UNREPORTED_MAX)
        self._allowance = planner.budget.keys

    @property
    def all_reported(self) -> bool:
        """True if policies have been notified of all uses. A use waits until all its keys are
        known."""
        return not self._unreported

    def clear(self) -> None:
        """Forget all uses."""
        self.pins.clear()
        self._unreported.clear()

    def advance(self) -> None:
        """Notify policies of uses, in the order in which requests ended, within this step's
        allowance."""
        while self._unreported:
            use = self._unreported.popleft()
            self._allowance.take(use.keys.make(use.count, self._allowance.left))
            if self._allowance.left <= 0:
                self._unreported.appendleft(use)
                return
            self._planner.uses.ended(use.keys.first(use.count), use.hints)

    def ended(self, state: RequestState, request: Request, tokens: int, now: float) -> int:
        """Complete a request that has ended, after ``tokens`` were computed and their chunks
        planned.

        Returns the number of its tokens that were pinned.
        """
        identity = state.identity
        self._note_use(identity, tokens)
        return self._pin(identity, request, tokens, now) if identity.origin.controls.pin_s else 0

    def _note_use(self, identity: RequestIdentity, tokens: int) -> None:
        """Record one use of the request's chunks, group by group in prefix order.

        This happens once per request, at its end, so a policy that counts or times uses sees one
        use per request.
        """
        hints = identity.origin.hints.ended
        for keys, group in zip(identity.keys, self._layout.groups, strict=True):
            self._unreported.append(_UnreportedUse(keys, tokens // group.chunk_tokens, hints))
        self.advance()

    def _pin(self, identity: RequestIdentity, request: Request, tokens: int, now: float) -> int:
        """Pin the request's chunks; if ``pinned_tokens`` was given, only those of its first
        tokens."""
        pinned = identity.origin.hints.pinned_tokens
        if pinned:
            tokens = int(min(tokens, request.num_prompt_tokens, pinned))
        pinned_tokens = []
        for keys, group in zip(identity.keys, self._layout.groups, strict=True):
            seconds = identity.origin.controls.pin_s
            count = self.pins.pin(keys[: tokens // group.chunk_tokens], seconds, now)
            if group.kind == FULL:
                pinned_tokens.append(count * group.chunk_tokens)
        return min(pinned_tokens, default=0)

    def report(self, state: RequestState, pinned_tokens: int) -> dict[str, Any]:
        """The report to the client, sent as ``kv_transfer_params`` of its answer."""
        report: dict[str, Any] = {"loaded_tokens": self.loaded(state)}
        if state.identity.origin.controls.pin_s:
            report["pinned_tokens"] = pinned_tokens
        if state.identity.rejected_options:
            report["ignored"] = list(state.identity.rejected_options)
        if state.identity.origin.controls.is_doubtful:
            report["not_stored"] = NOT_STORED
        return {REPORT: report}

    def loaded(self, state: RequestState) -> dict[str, int]:
        """The number of tokens that were loaded for the request, by tier name.

        Empty if the load has failed, or was under way when the request was abandoned.
        """
        if state.outcome.failures or state.outcome.loading:
            return {}
        names, tokens_by_tier = self._planner.tier_names, state.outcome.tokens_by_tier
        return {names[tier]: tokens for tier, tokens in tokens_by_tier.items() if tokens}

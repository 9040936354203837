"""Explains why a request missed: which chunk was the first to be missing, and why.

Part of the scheduler side, on its thread; pure. Each request is explained once, when vLLM has
accepted the hit. Only the chunks of one boundary are checked again, so the cost does not depend on
the prompt's length.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from offload.index.tier_index import TierIndex
from offload.layout.groups import FULL
from offload.layout.keys import CPU
from offload.layout.prefix_match import PrefixMatcher, present_in
from offload.messages.report import JobResult
from offload.planner.planner import Planner
from offload.requests.request_identity import RequestIdentity
from offload.telemetry.removed_chunks import Cause, Removed

OTHER_NAMESPACES_S = 3600.0
"""Time after the start in which a chunk that was never stored here is assumed to be in another
namespace."""


class Reason(enum.Enum):
    """The reason why a hit was not longer. The names of the members are used in the metric and in
    the file."""

    COMPLETE = "complete"
    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    NO_SPACE = "no_room"
    NOT_ADMITTED = "not_admitted"
    STORING = "storing"
    STORE_FAILED = "store_failed"
    CORRUPT = "corrupt"
    LOST = "lost"
    NAMESPACE = "namespace"
    RESET = "reset"
    WINDOW = "window"
    FILTERED = "filtered"
    BUDGET = "budget"
    BREAKER = "breaker"
    BREAK_EVEN = "break_even"
    DEADLINE = "deadline"
    LOAD_FAILED = "load_failed"
    UNANSWERED = "unanswered"

    __hash__ = object.__hash__  # members are singletons; ``Enum``'s hash is a Python function


MEANINGS: dict[Reason, str] = {
    Reason.COMPLETE: "nothing was missing",
    Reason.NEVER_STORED: "this prefix was never stored here, or it left the tiers so long ago "
    "that the server no longer knows the cause",
    Reason.EVICTED: "it was stored and then evicted; the tier is too small for this traffic",
    Reason.NO_SPACE: "there was no space when it was computed: all slots were in use, or too "
    "many chunks were being stored at once",
    Reason.NOT_ADMITTED: "the tier's admission policy rejected it",
    Reason.STORING: "it is being stored at this moment",
    Reason.STORE_FAILED: "storing it failed, or its GPU blocks were reused before it was copied",
    Reason.CORRUPT: "its record was damaged and was dropped",
    Reason.LOST: "its record had disappeared from the tier",
    Reason.NAMESPACE: "it may be stored in another namespace, whose records are not used",
    Reason.RESET: "all tiers were reset on request, for example after a change of weights",
    Reason.WINDOW: "the sliding window or recurrent state for this boundary was not kept, "
    "although full-attention layers may have it",
    Reason.FILTERED: "the request or vLLM excluded this chunk, or the request must not use the "
    "cache",
    Reason.BUDGET: "too many loads were in progress",
    Reason.BREAKER: "the circuit breaker of its tier is open",
    Reason.BREAK_EVEN: "loading from its tier is slower than computing",
    Reason.DEADLINE: "loading took longer than load_timeout_s",
    Reason.LOAD_FAILED: "loading failed",
    Reason.UNANSWERED: "a shared tier did not reply within lookup_timeout_s, or could not reply",
}
_OF_CAUSE = {
    Cause.EVICTED: Reason.EVICTED,
    Cause.CORRUPT: Reason.CORRUPT,
    Cause.LOST: Reason.LOST,
    Cause.FAILED: Reason.STORE_FAILED,
    Cause.CANCELLED: Reason.STORE_FAILED,
    Cause.NO_SPACE: Reason.NO_SPACE,
    Cause.NOT_ADMITTED: Reason.NOT_ADMITTED,
    Cause.RESET: Reason.RESET,
}


@dataclass(slots=True)
class Miss:
    """Explains why a hit was not longer.

    ``depth_tokens`` is the end of the missing chunk, ``ago_s`` how long ago it was removed,
    ``policy`` the policy that evicted it; ``note`` gives details.
    """

    reason: Reason
    group: int = -1
    depth_tokens: int = 0
    key: bytes = b""
    tier: str = ""
    policy: str = ""
    ago_s: float | None = None
    note: str = ""


class Explainer:
    """Finds the reason of a miss.

    ``namespace_differences`` names the fields in which records of other namespaces differ, for
    tiers that were empty at the start.
    """

    def __init__(self, matcher: PrefixMatcher, namespace_differences: Sequence[str] = ()) -> None:
        self._matcher = matcher
        self._namespace_differences = "; ".join(namespace_differences)[:500]
        self._started_s: float | None = None

    def why(
        self, planner: Planner, identity: RequestIdentity, start: int, hit: int, limits: range
    ) -> Miss:
        """Explain why the hit of a lookup from ``start`` on ends at ``hit`` tokens.

        ``limits`` are two lengths in tokens: of the longest hit that the request's options allow,
        and of the longest that its prompt allows.
        """
        now = planner.now
        self._started_s = now if self._started_s is None else self._started_s
        boundary = self._matcher.next_boundary(hit)
        if boundary > limits.stop:
            return Miss(Reason.COMPLETE)
        if boundary > limits.start:
            return Miss(Reason.FILTERED, depth_tokens=boundary, note="max_load_tokens")
        present = present_in(*planner.sources.holders(identity.origin.controls.read))
        found = self._matcher.first_missing(identity.keys, present, start, hit)
        if found is None:
            return Miss(Reason.COMPLETE)
        index, chunk = found
        group = self._matcher.layout.groups[index]
        key = identity.keys[index][chunk]
        miss = self._absent(planner, identity, key, group.kind, now)
        miss.key, miss.group = key, group.group
        miss.depth_tokens = (chunk + 1) * group.chunk_tokens
        return miss

    def _absent(
        self, planner: Planner, identity: RequestIdentity, key: bytes, kind: str, now: float
    ) -> Miss:
        held = self._held_back(planner, identity.origin.controls.read, key)
        if held is not None:
            return held
        if any(index.is_filling(key) for index in (planner.cpu, *planner.lower)):
            return Miss(Reason.STORING)
        unanswered = self._unanswered(planner, identity.origin.controls.read, key)
        if unanswered is not None:
            return unanswered
        departure = planner.causes.find(key)
        if departure is not None:
            return _departed(planner, departure, now)
        if kind != FULL:
            return Miss(Reason.WINDOW)
        assert self._started_s is not None
        if self._namespace_differences and now - self._started_s < OTHER_NAMESPACES_S:
            return Miss(Reason.NAMESPACE, note=self._namespace_differences)
        return Miss(Reason.NEVER_STORED)

    @staticmethod
    def _unanswered(planner: Planner, read: frozenset[int] | None, key: bytes) -> Miss | None:
        """Explain why it is unknown whether a shared tier has a chunk, if that is the case."""
        for tier in sorted(planner.presence.tiers):
            name, health = planner.lower[tier].name, planner.health[tier]
            if planner.presence.is_unanswered(tier, key):
                return Miss(Reason.UNANSWERED, tier=name)
            if not health.reads.closed and (read is None or tier in read):
                return Miss(Reason.BREAKER, tier=name, note="the tier was not queried")
        return None

    @staticmethod
    def _held_back(planner: Planner, read: frozenset[int] | None, key: bytes) -> Miss | None:
        """Explain why a chunk was not used although a tier holds it, if that is the case."""
        found = None
        if key in planner.cpu:
            found = Miss(Reason.FILTERED, tier="cpu", note="tiers")
        tiers = zip(planner.lower, planner.health.tiers, strict=True)
        for tier, (index, health) in enumerate(tiers):
            if key not in index:
                continue
            if read is not None and tier not in read:
                found = found or Miss(Reason.FILTERED, tier=index.name, note="tiers")
            elif not health.reads.closed:
                return Miss(Reason.BREAKER, tier=index.name)
            elif not health.break_even.pays:
                return Miss(Reason.BREAK_EVEN, tier=index.name)
        return found


def _departed(planner: Planner, departure: Removed, now: float) -> Miss:
    index = planner.cpu if departure.tier == CPU else planner.lower[departure.tier]
    policy = _policy_of(index) if departure.cause is Cause.EVICTED else ""
    ago_s = max(0.0, now - departure.time_s)
    return Miss(_OF_CAUSE[departure.cause], tier=index.name, policy=policy, ago_s=ago_s)


def _policy_of(index: TierIndex) -> str:
    return type(getattr(index.policy, "active", index.policy)).__name__


def failed(result: JobResult | None) -> Reason:
    """Explain why a load failed; ``result`` is ``None`` if its job has not ended yet."""
    if result is None or result.late:
        return Reason.DEADLINE
    if result.corrupt:
        return Reason.CORRUPT
    return Reason.LOST if result.lost else Reason.LOAD_FAILED

"""Finds the longest prefix of a request that is worth restoring.

That is the longest hit, without any tail that is faster to compute than to load, or that cannot be
loaded in time. Used on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from offload.layout.keys import CPU
from offload.layout.prefix_match import PrefixMatcher, present_in
from offload.planner.load_or_recompute import ShortenReason
from offload.planner.load_sources import SAMPLED_CHUNKS
from offload.planner.planner import Planner
from offload.requests.request_state import RequestState

HoldersOf = Callable[[frozenset[int] | None, int | None], tuple[Container[bytes], ...]]
"""The holders that a request may use, by ``read`` and ``above``; see ``LoadSources.holders``."""


class Hit(NamedTuple):
    """The end of the longest prefix that can be restored.

    It equals the start of the lookup if nothing can be restored, and is ``None`` if the step's
    lookup allowance is used up (try again in the next step). ``shorten_reason`` says why a longer
    prefix, which is available, is not loaded.
    """

    end_tokens: int | None
    shorten_reason: ShortenReason = ShortenReason.NOTHING


class HitSearch:
    """Searches one planner's tiers, as far as ``holders`` allows.

    ``computing`` counts the tokens that vLLM computes before it begins with another request, or
    returns ``None`` if the requests wait anyway.
    """

    def __init__(
        self,
        matcher: PrefixMatcher,
        planner: Planner,
        holders: HoldersOf,
        computing: Callable[[], int | None],
    ) -> None:
        self._matcher = matcher
        self._planner = planner
        self._holders = holders
        self._computing = computing

    def longest(self, state: RequestState, start: int, limit: int) -> Hit:
        """Find the longest prefix worth restoring of a request whose first ``start`` tokens vLLM
        holds, and which can load no tokens after ``limit``.

        If only a lower tier holds the tail of the prefix, that tail is loaded only as far as this
        is worthwhile; the rest is computed. Without that tail, the prefix ends where the nearer
        tiers have no more chunks.
        """
        known = state.lookup.known
        known.begin()
        hit, reason = self._match(state, start, limit), ShortenReason.NOTHING
        tiers = self._planner.health.tiers
        for tier in reversed(range(len(tiers))):
            break_even = tiers[tier].break_even
            if hit <= start or known.is_partial or not break_even.may_cut(hit - start):
                break
            shorter = self._match(state, start, limit, tier)
            if shorter >= hit:
                continue
            read = self._tokens_read(state, range(shorter, hit), tier)
            part, part_reason = break_even.part(read, self._computing())
            if part >= read:
                break
            reason = part_reason
            if part:
                hit = max(shorter, self._match(state, start, shorter + part))
                break
            hit = shorter
        return Hit(None) if known.is_partial else Hit(hit, reason)

    def in_cpu_tier(self, state: RequestState, start: int, limit: int, why: ShortenReason) -> Hit:
        """Find the part of the longest prefix that is in the CPU tier now. ``why`` says why a
        request loads no more than that."""
        known = state.lookup.known
        known.begin()
        hit, near = self._match(state, start, limit), self._match(state, start, limit, CPU)
        if known.is_partial:
            return Hit(None)
        return Hit(near, why) if near < hit else Hit(hit)

    def _match(self, state: RequestState, start: int, limit: int, above: int | None = None) -> int:
        """The longest restorable prefix in tokens; with ``above``, from nearer tiers than that."""
        planner, identity = self._planner, state.identity
        holders = self._holders(identity.origin.controls.read, above)
        first_gap = state.lookup.known.first_gap_in(
            above, holders, planner.removals, planner.budget.lookups
        )
        present = present_in(*holders)
        return self._matcher.longest_match(identity.keys, present, start, limit, first_gap)

    def _tokens_read(self, state: RequestState, tail: range, tier: int) -> int:
        """The number of tokens of this tail that nearer tiers do not hold, estimated from a
        sample."""
        matcher, identity = self._matcher, state.identity
        present = present_in(*self._holders(identity.origin.controls.read, tier))
        most, groups = 0, matcher.layout.groups
        chunks_of = matcher.load_ranges(tail.start, tail.stop)
        for group, mine, chunks in zip(groups, identity.keys, chunks_of, strict=True):
            sample = mine[chunks.start : chunks.stop : 1 + len(chunks) // SAMPLED_CHUNKS]
            if sample:
                absent = present(sample).count(0) * len(chunks) // len(sample)
                most = max(most, absent * group.chunk_tokens)
        return min(most, len(tail))

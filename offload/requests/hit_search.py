"""Finds the longest prefix of a request that is worth restoring.

That is the longest hit, without any tail that is faster to compute than to load, or that cannot be
loaded in time. Used on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.index.chunk_batch import RequestOrigin
from offload.layout.keys import CPU
from offload.layout.prefix_match import PrefixMatcher, present_in
from offload.planner.load_or_recompute import ShortenReason
from offload.planner.load_sources import SAMPLED_CHUNKS
from offload.planner.planner import Planner
from offload.requests.lookup_cache import PartialLookup


class Hit(NamedTuple):
    """The end of the longest prefix that can be restored.

    It equals the start of the lookup if nothing can be restored, and is ``None`` if the step's
    lookup allowance is used up (try again in the next step). ``shorten_reason`` says why a longer
    prefix, which is available, is not loaded.
    """

    end_tokens: int | None
    shorten_reason: ShortenReason = ShortenReason.NOTHING


class HitSearch:
    """Searches one planner's tiers. ``computing`` counts the tokens that vLLM computes before it
    begins with another request."""

    def __init__(
        self, matcher: PrefixMatcher, planner: Planner, computing: Callable[[], int]
    ) -> None:
        self._matcher = matcher
        self._planner = planner
        self._computing = computing

    def longest(
        self,
        keys: Sequence[Sequence[bytes]],
        origin: RequestOrigin,
        known: PartialLookup,
        tokens: range,
        *,
        shorten_reason: ShortenReason = ShortenReason.NOTHING,
        is_ahead: bool = False,
    ) -> Hit:
        """Find the longest prefix worth restoring of a request whose first ``tokens.start`` tokens
        vLLM holds, and which can load no tokens after ``tokens.stop``.

        ``keys`` are the keys of its chunks by group, ``origin`` says what the request may read, and
        ``known`` holds the results of its earlier lookups. If only a lower tier holds the tail of
        the prefix, that tail is loaded only as far as this is worthwhile; the rest is computed.
        Without that tail, the prefix ends where the nearer tiers have no more chunks.

        With a ``shorten_reason``, only what is in the CPU tier now is loaded. With ``is_ahead`` the
        request waits anyway, and its chunks are read ahead, from all tiers that work.
        """
        planner, matcher = self._planner, self._matcher
        start, limit = tokens.start, tokens.stop
        tokens_max = origin.controls.max_load_tokens
        limit = limit if tokens_max is None else min(limit, start + tokens_max)
        known.begin()

        def longest_match(above: int | None, end: int) -> int:
            holders = planner.sources.holders(origin.controls.read, above, is_ahead=is_ahead)
            first_gap = known.first_gap_in(above, holders, planner.removals, planner.budget.lookups)
            return matcher.longest_match(keys, present_in(*holders), start, end, first_gap)

        hit, reason = longest_match(None, limit), ShortenReason.NOTHING
        tiers = range(len(planner.lower))
        if shorten_reason is not ShortenReason.NOTHING and hit > start:
            in_cpu_tier, tiers = longest_match(CPU, limit), range(0)
            if in_cpu_tier < hit:
                hit, reason = in_cpu_tier, shorten_reason
        for tier in reversed(tiers):
            break_even = planner.health[tier].break_even
            if hit <= start or known.is_partial or not break_even.may_cut(hit - start):
                break
            shorter = longest_match(tier, limit)
            if shorter >= hit:
                continue
            read = self._tokens_read(keys, range(shorter, hit), tier, origin)
            part, part_reason = break_even.part(read, None if is_ahead else self._computing())
            if part >= read:
                break
            reason = part_reason
            if part:
                hit = max(shorter, longest_match(None, shorter + part))
                break
            hit = shorter
        return Hit(None) if known.is_partial else Hit(hit, reason)

    def _tokens_read(
        self, keys: Sequence[Sequence[bytes]], tail: range, tier: int, origin: RequestOrigin
    ) -> int:
        """The number of tokens of this tail that nearer tiers do not hold, estimated from a
        sample."""
        matcher = self._matcher
        present = present_in(*self._planner.sources.holders(origin.controls.read, above=tier))
        most = 0
        chunks_of = matcher.load_ranges(tail.start, tail.stop)
        for group, mine, chunks in zip(matcher.layout.groups, keys, chunks_of, strict=True):
            sample = mine[chunks.start : chunks.stop : 1 + len(chunks) // SAMPLED_CHUNKS]
            if sample:
                absent = present(sample).count(0) * len(chunks) // len(sample)
                most = max(most, absent * group.chunk_tokens)
        return min(most, len(tail))

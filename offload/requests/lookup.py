"""Looks up one request and records what was found.

Runs on vLLM's scheduler thread. A lookup is repeated while its request waits; its log entry is made
once, when vLLM has accepted the hit.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from offload.index.chunk_batch import ChunkBatch
from offload.layout.prefix_match import PrefixMatcher, present_in
from offload.planner.load_or_recompute import ShortenReason
from offload.planner.planner import Planner
from offload.planner.presence import PendingLookup
from offload.requests.hit_search import Hit, HitSearch
from offload.requests.miss_reasons import Explainer, Miss, Reason, failed
from offload.requests.request_identity import Prompt
from offload.requests.request_log import LoggedRequest, RequestLog
from offload.requests.request_state import RequestState

logger = logging.getLogger(__name__)

REQUEST_CHARS_MAX = 128


class Lookups:
    """Looks requests up in one planner's tiers. ``seconds`` and ``count`` cover all lookups.

    ``computing`` counts the tokens that vLLM computes before it begins with another request.
    """

    def __init__(
        self,
        matcher: PrefixMatcher,
        planner: Planner,
        log: RequestLog,
        namespace_differences: Sequence[str] = (),
        computing: Callable[[], int] = lambda: 0,
    ) -> None:
        self.seconds = 0.0
        self.count = 0
        self.log = log
        self._matcher = matcher
        self._planner = planner
        holders = planner.sources.holders
        self._search = HitSearch(matcher, planner, holders, computing)
        # requests that wait anyway
        self._search_ahead = HitSearch(
            matcher, planner, partial(holders, is_ahead=True), lambda: None
        )
        self._unfinished: dict[str, tuple[RequestState, Prompt]] = {}
        self._asked: set[str] = set()  # in this step
        self._chunk_blocks = [group.chunk_blocks for group in matcher.layout.groups]
        self._alignment = matcher.layout.alignment_tokens
        self._restores_whole = matcher.layout.restores_whole_prompts
        self._explainer = Explainer(matcher, namespace_differences)
        self._computing = computing

    def advance(self) -> None:
        """Spend the rest of the step's allowance on unfinished lookups that vLLM did not repeat in
        this step.

        vLLM does not look up waiting requests if other requests fill the step.
        """
        asked, self._asked = self._asked, set()
        for name, (state, request) in list(self._unfinished.items()):
            if self._planner.budget.lookups.left <= 0:
                break
            if name not in asked:
                self._go_on(state, request)

    def _go_on(self, state: RequestState, request: Prompt) -> None:
        wait = state.lookup.wait
        if wait is not None and self._planner.presence.is_stale(wait, time.monotonic()):
            return  # the request's next lookup queries again before it uses the known results
        if self._find(state, request, state.lookup.start).end_tokens is not None:
            self.forget(state)

    def forget(self, state: RequestState) -> None:
        """Forget an unfinished lookup that is no longer needed."""
        self._unfinished.pop(state.identity.request, None)

    def look_up(
        self,
        state: RequestState,
        request: Prompt,
        computed_tokens: int,
        shorten_reason: ShortenReason = ShortenReason.NOTHING,
    ) -> int | None:
        """Return how many tokens beyond ``computed_tokens`` can be loaded now; with a
        ``shorten_reason``, only from the CPU tier.

        ``None`` means: try again in the next step. A shared tier was queried and may reply soon,
        the prompt is too long for one step's allowance, or other loads must end before this one.
        Does not change the tiers.
        """
        started = time.perf_counter()
        lookup, identity = state.lookup, state.identity
        lookup.begin(computed_tokens, started)
        is_waiting = False
        if not identity.no_load:
            identity.extend(request.block_hashes)
            if self._planner.presence.tiers:
                is_waiting = self._query(state, request, computed_tokens)
            if not is_waiting:
                hit = self._find(state, request, computed_tokens, shorten_reason)
                end = hit.end_tokens
                is_waiting = end is None
                if end is None:
                    end = computed_tokens
                    self._unfinished[identity.request] = (state, request)
                elif self._unfinished:
                    self.forget(state)
                if end > computed_tokens and not self._can_load(state, end):
                    is_waiting = self._refuse(state, end, time.monotonic())
                lookup.end(end, hit.shorten_reason)
                self._asked.add(identity.request)
        self.seconds += time.perf_counter() - started
        self.count += 1
        tokens = lookup.hit_end_tokens - computed_tokens if lookup.is_promised else 0
        return None if is_waiting else tokens

    def _query(self, state: RequestState, request: Prompt, start: int) -> bool:
        """Query the shared tiers about this request's chunks, if they have not been queried or
        their replies are about to expire. Returns True if replies may soon come."""
        shared = self._planner.presence
        now = time.monotonic()
        wait = state.lookup.wait
        if wait is None or shared.is_stale(wait, now):
            end = self._limits(state, request, start).start
            wait = self._query_chunks(state, range(start, end), now)
            state.lookup.note_query(wait)
        return shared.check_wait(wait, now)

    def _query_chunks(self, state: RequestState, tokens: range, now: float) -> PendingLookup:
        """Query shared tiers for the chunks with these tokens that no tier is known to hold."""
        keys, read = state.identity.keys, state.identity.origin.controls.read
        wanted = self._matcher.wanted(keys, tokens.start, tokens.stop)
        held = present_in(*self._planner.sources.holders(read))(wanted)
        missing = [key for key, is_held in zip(wanted, held, strict=True) if not is_held]
        return self._planner.presence.query(missing, read, now)

    def query_ahead(
        self, state: RequestState, request: Prompt, start: int, now: float
    ) -> PendingLookup:
        """Query shared tiers for a waiting request if vLLM holds its first ``start`` tokens: for as
        many chunks as the lookups of a short step may query."""
        state.identity.extend(request.block_hashes)
        allowance = self._planner.budget.lookups
        size = min(group.chunk_tokens for group in self._matcher.layout.groups)
        end = self._limits(state, request, start).start
        end = min(end, start + size * allowance.chunks)
        allowance.take((end - start) // size)
        return self._query_chunks(state, range(start, end), now)

    def _can_load(self, state: RequestState, end_tokens: int) -> bool:
        """True if the planner accepts the load of a hit that ends at this token."""
        if not self._planner.loads.loading:  # one load is always accepted, however large
            return True
        chunks = [len(part) for part in self.load_ranges(state, end_tokens)]
        blocks = sum(map(operator.mul, chunks, self._chunk_blocks))
        return self._planner.loads.can_load(sum(chunks), blocks, state.identity.origin)

    def _refuse(self, state: RequestState, end_tokens: int, now: float) -> bool:
        """Refuse the load of a hit, because too many other loads are in flight.

        Returns True if the request waits for these loads, for a limited time: chunks were read
        ahead for it, or computing its tokens would take longer. Otherwise the tokens are computed,
        and what was read ahead for the request is wasted.
        """
        lookup, planner = state.lookup, self._planner
        if lookup.refuse(now):
            planner.stats.load_refused()
            batches = self._batches(state, self.load_ranges(state, end_tokens))
            tokens = planner.sources.expected(batches, state.identity.origin.controls.read)
            lookup.wait_for_loads(planner.health.patience_s(tokens, self._computing()))
        has_read = planner.look_ahead.has_read(state.identity.request)
        patience_s = planner.health.load_timeout_s if has_read else lookup.patience_s
        return now - lookup.refused_s < patience_s

    def _limits(self, state: RequestState, request: Prompt, start: int) -> range:
        """Two lengths in tokens, if vLLM holds the first ``start`` tokens: of the longest prefix
        that the request's options allow, and of the longest that can be restored.

        vLLM samples from the output of the last token, and computes that token again if everything
        was restored. If only the last block is missing, it is computed: that takes the same one
        step as computing one token, without a load before it.
        """
        tokens = request.num_tokens
        whole = self._restores_whole and tokens - start > self._alignment
        possible = tokens if whole else tokens - 1
        tokens_max = state.identity.origin.controls.max_load_tokens
        allowed = possible if tokens_max is None else min(possible, start + tokens_max)
        return range(allowed, possible)

    def load_ranges(self, state: RequestState, end_tokens: int) -> tuple[range, ...]:
        """Return the chunks of each group to load for a hit that ends at this token.

        The result is computed once per lookup.
        """
        lookup = state.lookup
        if lookup.load_end_tokens != end_tokens:
            lookup.choose(self._matcher.load_ranges(lookup.start, end_tokens), end_tokens)
        return lookup.load

    def _find(
        self,
        state: RequestState,
        request: Prompt,
        start: int,
        shorten_reason: ShortenReason = ShortenReason.NOTHING,
    ) -> Hit:
        end = self._limits(state, request, start).start
        if shorten_reason is ShortenReason.NOTHING:
            hit = self._search.longest(state, start, end)
        else:
            hit = self._search.in_cpu_tier(state, start, end, shorten_reason)
        if hit.shorten_reason is not ShortenReason.NOTHING:
            self._planner.stats.shortened()
        return hit

    def ahead(self, state: RequestState, request: Prompt, start: int) -> list[ChunkBatch] | None:
        """The chunks that a request will load if vLLM holds its first ``start`` tokens, as far as
        this is known before vLLM looks it up; without blocks. ``None``: ask again in the next step.
        Does not change the result of the request's last lookup, because vLLM may still rely on that
        hit.
        """
        state.identity.extend(request.block_hashes)
        limit = self._limits(state, request, start).start
        end = self._search_ahead.longest(state, start, limit).end_tokens
        return None if end is None else self._batches(state, self._matcher.load_ranges(start, end))

    def _batches(self, state: RequestState, ranges: Sequence[range]) -> list[ChunkBatch]:
        """These chunks of each group, without blocks."""
        batches, identity = [], state.identity
        groups = self._matcher.layout.groups
        for group, keys, chunks in zip(groups, identity.keys, ranges, strict=True):
            size = group.chunk_tokens
            depths = range((chunks.start + 1) * size, (chunks.stop + 1) * size, size)
            mine = keys[chunks.start : chunks.stop]
            if mine:
                batches.append(ChunkBatch(mine, group.group, (), depths, identity.origin))
        return batches

    def accepted(self, state: RequestState, request: Prompt, external_tokens: int) -> None:
        """Make the request's log entry, once: vLLM has accepted the hit of the last lookup."""
        lookup = state.lookup
        lookup.accept()
        if lookup.logged is not None:
            return
        limits = self._limits(state, request, lookup.start)
        wanted = max(0, limits.stop // self._alignment * self._alignment - lookup.start)
        is_used = not (state.identity.no_load or lookup.refused)
        hit = min(lookup.hit_end_tokens - lookup.start, external_tokens) if is_used else 0
        # a client can choose the request's name, so it may have been used before
        name = request.request_id[:REQUEST_CHARS_MAX]
        logged = LoggedRequest(
            name,
            time.time(),
            request.num_prompt_tokens,
            lookup.start,
            wanted,
            hit,
            miss=self._miss(state, wanted, hit, limits),
            ahead=lookup.ahead,
            waited_s=lookup.waited_s,
            lookup_s=time.perf_counter() - lookup.asked_s,
            trace_headers=request.trace_headers,
        )
        if wanted != hit:
            self._planner.stats.missed(wanted - hit)
        lookup.note_logged(logged)
        self.log.add(logged)
        if not hit:
            self._known(logged)

    def _miss(self, state: RequestState, wanted: int, hit: int, limits: range) -> Miss:
        """Explain why no more than ``hit`` tokens are loaded, of those ``wanted``."""
        lookup, identity = state.lookup, state.identity
        start, end = lookup.start, lookup.hit_end_tokens
        if identity.no_load:
            if not wanted:
                return Miss(Reason.COMPLETE)
            return Miss(Reason.FILTERED, note=identity.filtered_by)
        if lookup.refused:
            return Miss(Reason.BUDGET)
        if hit < end - start:
            return Miss(Reason.FILTERED, note="vLLM accepted fewer tokens than were found")
        if lookup.shortened is not ShortenReason.NOTHING:
            return Miss(Reason.BREAK_EVEN, note=lookup.shortened.value)
        return self._explainer.why(self._planner, identity, start, end, limits)

    def ended(self, ended: Iterable[RequestState], failures: Iterable[RequestState]) -> None:
        """Record the end of these requests' loads; those in ``failures`` have failed."""
        results = self._planner.loads.take_failed()
        for state in failures:
            if state.lookup.logged is not None and not state.lookup.logged.final:
                self.log.count_failed_load(
                    state.lookup.logged, failed(results.get(state.identity.request))
                )
        for state in ended:
            if state.lookup.logged is not None and not state.lookup.logged.final:
                loaded = None if state.outcome.failures else self._loaded(state)
                if loaded is not None:
                    state.lookup.logged.set_load_time(state.outcome.load_seconds)
                self._known(state.lookup.logged, loaded)

    def _loaded(self, state: RequestState) -> dict[str, int]:
        names, tokens_by_tier = self._planner.tier_names, state.outcome.tokens_by_tier
        return {names[tier]: tokens for tier, tokens in tokens_by_tier.items() if tokens}

    def _known(self, logged: LoggedRequest, loaded: Mapping[str, int] | None = None) -> None:
        self.log.finalize(logged, loaded)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("kvtiers: lookup of request %s: %s", logged.request, logged.as_json())

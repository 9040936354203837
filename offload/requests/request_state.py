"""The state of a live request on the scheduler side, in four parts.

Pure; knows no vLLM type. Used on vLLM's scheduler thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from offload.planner.jobs import LoadTokens
from offload.planner.load_or_recompute import ShortenReason
from offload.planner.look_ahead.ahead_use import NOT_READ_AHEAD, AheadUse
from offload.planner.own_chunks import OwnChunks
from offload.planner.presence import PendingLookup
from offload.requests.lookup_cache import PartialLookup
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_log import LoggedRequest


class LookupState:
    """The last lookup of a request. `offload.requests.lookup` begins and ends it; the scheduler
    side records what the request waited for.

    The lookup began at ``start`` and its hit ends at ``hit_end_tokens``. ``asked_s`` is the time of
    the request's first lookup (``time.perf_counter``). ``known`` caches the results of all lookups;
    ``wait`` is the last query to shared tiers. ``is_promised`` means that a hit was reported to
    vLLM and that vLLM has not allocated blocks for it yet.

    ``refused`` means that the load was refused because too many loads were under way. This happened
    for the first time at ``refused_s`` (0: not yet); from then on the request may wait for those
    loads for ``patience_s``. ``shortened`` says why a tail that the tiers hold was cut off.
    ``waited_s`` is the time for which the request got no GPU blocks because its chunks were being
    read ahead; ``ahead`` says how these reads were used. ``load`` has the chunks to load by group,
    for a hit that ends at ``load_end_tokens``. ``logged`` is the request's log entry, once vLLM has
    accepted the hit.
    """

    __slots__ = (
        "ahead",
        "asked_s",
        "hit_end_tokens",
        "is_promised",
        "known",
        "load",
        "load_end_tokens",
        "logged",
        "patience_s",
        "refused",
        "refused_s",
        "shortened",
        "start",
        "wait",
        "waited_s",
    )

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.start = 0
        self.hit_end_tokens = 0
        self.known = PartialLookup()
        self.is_promised = False
        self.refused = False
        self.refused_s = self.patience_s = 0.0
        self.shortened = ShortenReason.NOTHING
        self.waited_s = 0.0
        self.ahead = NOT_READ_AHEAD
        self.load: tuple[range, ...] = ()
        self.load_end_tokens = 0
        self.wait: PendingLookup | None = None
        self.logged: LoggedRequest | None = None

    def begin(self, start: int, now_s: float) -> None:
        """Begin a lookup, which has found nothing yet."""
        if not self.asked_s:
            self.asked_s = now_s
        self.start = self.hit_end_tokens = self.load_end_tokens = start
        self.load = ()
        self.refused = self.is_promised = False

    def note_query(self, wait: PendingLookup | None) -> None:
        """Record the query to shared tiers that the request may wait for."""
        self.wait = wait

    def set_waited_s(self, seconds: float) -> None:
        """Set the time for which the request waited for reads ahead."""
        self.waited_s = seconds

    def note_read_ahead(self, ahead: AheadUse) -> None:
        """Set what look-ahead did for the request, which no longer waits."""
        self.ahead = ahead
        if self.logged is not None:
            self.logged.note_read_ahead(ahead)

    def refuse(self, now_s: float) -> bool:
        """Record that this request's load was refused because too many loads are in progress.
        Returns whether that is the first time since its last hit."""
        self.refused = True
        is_first = not self.refused_s
        if is_first:
            self.refused_s = now_s
        return is_first

    def wait_for_loads(self, patience_s: float) -> None:
        """Set how long the request may wait for other loads after its load was refused."""
        self.patience_s = patience_s

    def end(self, hit_end_tokens: int, shortened: ShortenReason) -> None:
        """End the lookup with this hit, which is promised to vLLM unless it was refused."""
        self.hit_end_tokens = hit_end_tokens
        self.shortened = shortened
        self.is_promised = not self.refused and hit_end_tokens > self.start

    def choose(self, load: tuple[range, ...], end_tokens: int) -> None:
        """Set the chunks to load for a hit that ends at this token."""
        self.load = load
        self.load_end_tokens = end_tokens

    def accept(self) -> None:
        """Record that vLLM has allocated blocks for the hit."""
        self.is_promised = False
        self.refused_s = 0.0
        self.known.clear()

    def note_logged(self, logged: LoggedRequest | None) -> None:
        """Set the request's log entry."""
        self.logged = logged

    def restart(self) -> None:
        """Forget the results after a preemption."""
        self.wait = None
        self.known.clear()


class StoreState:
    """The progress of storing a request. Changed by `offload.connector.scheduler.store_progress`
    and, for what may be wrong, by `offload.connector.scheduler.wrong_kv`.

    Chunks before ``next_chunk[i]`` of ``layout.groups[i]`` are done, and no further chunk is
    complete before ``ready_at`` tokens are computed. ``loaded`` has the chunks of the last load by
    group, which need no store. ``stale`` means that the blocks computed so far must not be stored.
    The KV of tokens from ``right_tokens`` on may be wrong and must not be stored either; the first
    ``hashes_checked`` block hashes were compared with those of wrong KV. ``removal_mark`` is the
    count of `offload.telemetry.removed_chunks.RemovalLog` when the request arrived. ``own`` has the
    chunks that its stores must not evict; it is ``None`` for models that can resume without the
    head of a prompt.
    """

    __slots__ = (
        "hashes_checked",
        "loaded",
        "next_chunk",
        "own",
        "ready_at",
        "removal_mark",
        "right_tokens",
        "stale",
    )

    def __init__(self, groups: int) -> None:
        self.next_chunk = [0] * groups
        self.ready_at = 0
        self.loaded: Sequence[range] = ()
        self.stale = False
        self.right_tokens = sys.maxsize
        self.hashes_checked = 0
        self.removal_mark = 0
        self.own: OwnChunks | None = None

    def begin(self, ready_at: int, removal_mark: int, own: OwnChunks | None) -> None:
        """Begin with the request's first chunk, which is complete at ``ready_at`` tokens."""
        self.ready_at = ready_at
        self.removal_mark = removal_mark
        self.own = own

    def set_ready_at(self, tokens: int) -> None:
        """Set the number of computed tokens at which the next chunk is complete."""
        self.ready_at = tokens

    def continue_at(self, index: int, chunk: int) -> None:
        """Continue with this chunk of ``layout.groups[index]``."""
        self.next_chunk[index] = chunk

    def note_loaded(self, chunks: Sequence[range]) -> None:
        """Set the chunks of the last load; empty if they must be stored after all."""
        self.loaded = chunks

    def set_stale(self, *, stale: bool) -> None:
        """Set whether the blocks computed so far must not be stored."""
        self.stale = stale

    def end_at(self, tokens: int) -> None:
        """Store no token from this one on."""
        self.right_tokens = min(self.right_tokens, tokens)

    def note_checked(self, hashes: int) -> None:
        """Record that this many block hashes were checked."""
        self.hashes_checked = max(self.hashes_checked, hashes)

    def restart(self) -> None:
        """Start again after a preemption, which has freed all blocks."""
        self.next_chunk = [0] * len(self.next_chunk)
        self.ready_at = 0
        self.right_tokens = sys.maxsize
        self.hashes_checked = 0
        self.loaded = ()
        if self.own is not None:
            self.own.clear()


class RequestOutcome:
    """The results of the request's loads. Changed by `offload.connector.scheduler.scheduler_side`.

    ``loading`` means that a load is under way, ``failures`` counts failed loads.
    ``has_first_token`` means that vLLM has produced the first output token.
    """

    __slots__ = ("_tokens", "failures", "has_first_token", "loading")

    def __init__(self) -> None:
        self.loading = False
        self.failures = 0
        self.has_first_token = False
        self._tokens: LoadTokens | None = None

    @property
    def tokens_by_tier(self) -> Mapping[int, int]:
        """The tokens of the last load by source tier."""
        return self._tokens.by_tier if self._tokens is not None else {}

    @property
    def load_seconds(self) -> float | None:
        """The time of the last load on the slowest rank, once every rank has reported its end."""
        return self._tokens.seconds if self._tokens is not None else None

    def begin_load(self, tokens: LoadTokens) -> None:
        """Record that a load of these tokens was planned."""
        self._tokens = tokens
        self.loading = True

    def end_load(self) -> None:
        """Record that the load under way has ended."""
        self.loading = False

    def fail_load(self) -> None:
        """Count a load that has failed."""
        self.failures += 1

    def note_first_token(self) -> None:
        """Record that the first output token was seen."""
        self.has_first_token = True


class RequestState:
    """One live request. Owned by the scheduler side."""

    __slots__ = ("identity", "lookup", "outcome", "stores")

    def __init__(self, identity: RequestIdentity) -> None:
        self.identity = identity
        self.lookup = LookupState()
        self.stores = StoreState(len(identity.keys))
        self.outcome = RequestOutcome()

    def restart(self) -> None:
        """Restart after a preemption: the blocks are gone, and everything is looked up
        again."""
        self.stores.restart()
        self.lookup.restart()

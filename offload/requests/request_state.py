"""What the scheduler side remembers of a request: its keys, and how far they are stored.

Pure; knows no vLLM type. Keys grow with the request's block hashes and are made when they are
first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.index.chunk_batch import UNKNOWN, RequestOrigin
from offload.layout.groups import ModelLayout
from offload.layout.request_keys import RequestKeys
from offload.requests.lookup_cache import PartialLookup


class RequestState:
    """One live request.

    ``keys[i]`` are the chunk keys of ``layout.groups[i]``; chunks before ``next_chunk[i]`` need no
    more attention, and no other is complete before ``ready_at`` tokens are computed;
    ``has_answered`` means that its first output token was seen. ``lookup_start`` is where the last
    lookup began (tokens), ``found`` where its hit ends and ``known`` what all have found,
    ``refused`` whether there was no room for the load and ``shortened`` whether it was cut to what
    is worth loading; ``record`` is what is told of it; ``filtered_by`` is why ``no_load`` is set;
    ``wait`` is what shared tiers were last asked for it; ``told`` means that the client sent an
    object for us, ``wrong`` what was wrong in it, and ``pinned_tokens`` how many of its tokens were
    pinned; ``failures`` counts loads that failed; ``stale`` means that blocks computed so far must
    not be stored; ``sources`` are the tokens of the last load by tier and ``loaded`` its chunks by
    group, in the layout's order; ``mark`` is what `offload.telemetry.removed_chunks.RemovalLog`
    counted when the request came; ``origin`` is what policies may know of the request.
    """

    __slots__ = (
        "failures",
        "filtered_by",
        "found",
        "has_answered",
        "keys",
        "known",
        "loaded",
        "loading",
        "lookup_start",
        "mark",
        "next_chunk",
        "no_load",
        "no_store",
        "origin",
        "pinned_tokens",
        "ready_at",
        "record",
        "refused",
        "request",
        "shortened",
        "sources",
        "stale",
        "told",
        "wait",
        "wrong",
    )

    def __init__(self, request: str, layout: ModelLayout, identity: bytes = b"") -> None:
        self.request = request
        self.origin: RequestOrigin = UNKNOWN
        self.keys = [
            RequestKeys(group.group, group.chunk_tokens // layout.hash_tokens, identity)
            for group in layout.groups
        ]
        self.known = PartialLookup()
        self.next_chunk = [0] * len(layout.groups)
        self.ready_at = 0
        self.has_answered = False
        self.lookup_start = 0
        self.found = 0
        self.refused = False
        self.shortened = False
        self.record: Any = (
            None  # offload.requests.miss_reasons.RequestRecord, which is made from this
        )
        self.filtered_by = ""
        self.failures = 0
        self.loading = False
        self.loaded: Sequence[range] = ()
        self.mark = 0
        self.no_load = False
        self.no_store = False
        self.stale = False
        self.told = False
        self.wrong: Sequence[str] = ()
        self.pinned_tokens = 0
        self.wait: Any = None  # offload.planner.presence.PendingLookup
        self.sources: Mapping[int, int] = {}

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """These are the request's block hashes now: chunks that were completed have keys."""
        for keys in self.keys:
            keys.grow(block_hashes)

    def restart(self) -> None:
        """The request was preempted: its blocks are gone, everything is looked at again."""
        self.next_chunk = [0] * len(self.next_chunk)
        self.ready_at = 0
        self.stale = False
        self.wait = None
        self.known.clear()
        self.loaded = ()

"""The identity of a request, from its arrival on, and its permissions.

Pure; knows no vLLM type. Used on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from offload.index.chunk_batch import UNKNOWN, RequestOrigin
from offload.layout.groups import ModelLayout
from offload.layout.request_keys import RequestKeys


class Prompt(Protocol):
    """The part of vLLM's ``Request`` that a lookup reads.

    ``num_tokens`` includes the output so far, because a preempted request restores that, too.
    ``block_hashes`` grow with it.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def trace_headers(self) -> Mapping[str, str] | None: ...


class RequestIdentity:
    """Identifies a request and states what it may do.

    Made by `offload.connector.scheduler.live_requests` when the request arrives.

    ``keys[i]`` are the chunk keys of ``layout.groups[i]``. They grow with the request's block
    hashes and are made on first use. ``origin`` is the part of the request that policies may know.
    ``client_asked`` is set if the client sent an object for kvtiers, and ``rejected_options``
    describes the errors in it. ``filtered_by`` is the reason if ``no_load`` is set.
    """

    __slots__ = (
        "client_asked",
        "filtered_by",
        "keys",
        "no_load",
        "no_store",
        "origin",
        "rejected_options",
        "request",
    )

    def __init__(self, request: str, layout: ModelLayout, adapter: bytes = b"") -> None:
        self.request = request
        self.keys = [
            RequestKeys(group.group, group.chunk_tokens // layout.hash_tokens, adapter)
            for group in layout.groups
        ]
        self.origin: RequestOrigin = UNKNOWN
        self.client_asked = False
        self.rejected_options: Sequence[str] = ()
        self.no_load = False
        self.no_store = False
        self.filtered_by = "no_load"

    def exclude(self, why: str) -> None:
        """Exclude the request: it may neither load nor store any more."""
        self.no_load = self.no_store = True
        self.filtered_by = why

    def take_options(
        self, origin: RequestOrigin, rejected: Sequence[str], *, client_asked: bool
    ) -> None:
        """Store the client's options, and descriptions of the ``rejected`` ones."""
        self.origin = origin
        self.rejected_options = rejected
        self.client_asked = client_asked
        self.no_load = self.no_load or origin.controls.no_load
        self.no_store = self.no_store or origin.controls.no_store

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """Process the request's current block hashes: chunks that are now complete get keys."""
        for keys in self.keys:
            keys.grow(block_hashes)

"""Holds the live requests. Admits new ones: reads their identity, controls and hints, and records
them in the trace.

Part of the scheduler side, on its thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.connector.model.adapters import AdapterBook, Loaded
from offload.index.chunk_batch import RequestOrigin
from offload.layout.groups import ModelLayout, recorded_group
from offload.requests.parse_options import FIELD, INVALID_MAX, parse_controls, parse_hints
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_state import RequestState
from offload.requests.trace_recorder import RecordedPrompt, TraceRecorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LiveRequest:
    """A request of vLLM that has not ended, and our state of it."""

    state: RequestState
    request: Request


class LiveRequests:
    """The admitted live requests ``by_name``, and the ``adapters`` that they use.

    With ``require_salt``, requests without a salt are excluded; ``tiers`` are the names of the
    lower tiers. ``wrong_values`` counts invalid values that clients have sent.
    """

    def __init__(
        self,
        layout: ModelLayout,
        adapters: AdapterBook,
        *,
        require_salt: bool = False,
        recorder: TraceRecorder | None = None,
        tiers: Sequence[str] = (),
    ) -> None:
        self.by_name: dict[str, LiveRequest] = {}
        self._not_admitted: dict[str, Request] = {}  # not yet, or because it failed
        self.adapters = adapters
        self.wrong_values = 0
        self._tiers = tuple(tiers)
        self._layout = layout
        self._require_salt = require_salt
        self._recorder = recorder
        self._recorded = layout.groups.index(recorded_group(layout)) if recorder else 0
        self._warned = False

    def admit(self, request: Request) -> LiveRequest | None:
        """Add a new request.

        ``None`` means: call this again in the next step, because the content of the request's
        adapter may be known by then. If it stays unknown, the request is excluded.
        """
        self._not_admitted[request.request_id] = request
        adapter = self.adapters.identity_of(request)
        if adapter is None and self.adapters.may_come(request):
            return None
        identity = RequestIdentity(request.request_id, self._layout, adapter or b"")
        self.adapters.begin(request, adapter or b"")
        if adapter is None:
            identity.exclude("adapter")
        elif self._require_salt and not request.cache_salt:
            identity.exclude("require_salt")
        params = getattr(request, "kv_transfer_params", None)
        if params is not None or request.cache_salt:
            self._read_options(identity, request, params)
        if not (identity.no_load and identity.no_store):
            identity.extend(request.block_hashes)
        if self._recorder is not None:
            self._record(self._recorder, identity, request)
        live = self.by_name[request.request_id] = LiveRequest(RequestState(identity), request)
        del self._not_admitted[request.request_id]
        return live

    def all(self) -> Iterator[Request]:
        """All live requests, also those that could not be admitted."""
        yield from (live.request for live in self.by_name.values())
        yield from self._not_admitted.values()

    def end(self, request_id: str) -> RequestState | None:
        """Remove a request that has ended. Returns its state, if it was admitted."""
        self._not_admitted.pop(request_id, None)
        live = self.by_name.pop(request_id, None)
        self.adapters.end(request_id)
        return live.state if live is not None else None

    def adapters_loaded(self, loaded: Loaded) -> bool:
        """Record that the workers have loaded adapters. Returns whether the content of an adapter
        has changed; its requests are then excluded."""
        users = self.adapters.take(loaded)
        for live in filter(None, map(self.by_name.get, users)):
            live.state.identity.exclude("adapter")
        return bool(users)

    def close(self) -> None:
        """Finish the recording, if there is one, because the server stops."""
        if self._recorder is not None:
            self._recorder.close()

    def _read_options(self, identity: RequestIdentity, request: Request, params: object) -> None:
        """Read controls and hints.

        Invalid values are reported in the answer's parameters and counted; the first is logged as
        an example.
        """
        controls, invalid = parse_controls(params, self._tiers)
        hints, invalid_hints = parse_hints(params)
        rejected = [*invalid, *invalid_hints][:INVALID_MAX]
        has_ours = isinstance(params, Mapping) and params.get(FIELD) is not None
        salt = request.cache_salt
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        origin = RequestOrigin(digest, hints, controls)
        identity.take_options(origin, rejected, client_asked=has_ours or bool(rejected))
        self.wrong_values += len(rejected)
        if rejected and not self._warned:
            self._warned = True
            logger.warning(
                "kvtiers: in kv_transfer_params of request %s: %s. Further invalid values are "
                "reported to the client and counted, not logged",
                request.request_id,
                "; ".join(rejected[:4]),
            )

    def _record(self, recorder: TraceRecorder, identity: RequestIdentity, request: Request) -> None:
        identity.extend(request.block_hashes)
        size = self._layout.groups[self._recorded].chunk_tokens
        keys = identity.keys[self._recorded].frozen(request.num_prompt_tokens // size)
        hints = identity.origin.hints
        pinned = min(len(keys), int(min(hints.pinned_tokens, request.num_prompt_tokens) // size))
        given = {**hints.stored, **hints.ended}
        recorder.record(
            RecordedPrompt(time.monotonic(), keys, request.num_prompt_tokens, given, pinned)
        )

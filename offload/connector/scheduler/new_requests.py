"""What a new request brings along: its identity, whether it may take part, its controls, hints for
policies, and a line in the recorded trace."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offload.connector.model.adapters import AdapterBook
from offload.index.chunk_batch import RequestOrigin
from offload.index.request_options import FIELD, WRONG_MAX, parse_controls, parse_hints
from offload.layout.groups import ModelLayout, recorded_group
from offload.requests.request_state import RequestState
from offload.requests.trace_recorder import Seen, TraceRecorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class NewRequests:
    """Makes trackers. With ``require_salt`` requests without a salt stay outside; ``tiers`` are the
    names of the lower tiers. ``wrong_values`` counts what clients got wrong."""

    def __init__(
        self,
        layout: ModelLayout,
        adapters: AdapterBook,
        *,
        require_salt: bool = False,
        recorder: TraceRecorder | None = None,
        tiers: Sequence[str] = (),
    ) -> None:
        self.wrong_values = 0
        self._tiers = tuple(tiers)
        self._layout = layout
        self._adapters = adapters
        self._require_salt = require_salt
        self._recorder = recorder
        self._recorded = layout.groups.index(recorded_group(layout)) if recorder else 0
        self._warned = False

    def admit(self, request: Request) -> RequestState | None:
        """The tracker of a request that was not seen before; ``None``: ask again in the next step,
        because what its adapter holds may be known by then. Where that stays unknown the request
        stays outside."""
        identity = self._adapters.identity_of(request)
        if identity is None and self._adapters.may_come(request):
            return None
        tracker = RequestState(request.request_id, self._layout, identity or b"")
        self._adapters.begin(request, identity or b"")
        has_no_salt = self._require_salt and not request.cache_salt
        tracker.no_load = tracker.no_store = has_no_salt or identity is None
        why = "require_salt" if has_no_salt else "no_load"
        tracker.filtered_by = "adapter" if identity is None else why
        self._listen(tracker, request)
        if not (tracker.no_load and tracker.no_store):
            tracker.extend(request.block_hashes)
        if self._recorder is not None:
            self._record(self._recorder, tracker, request)
        return tracker

    def close(self) -> None:
        """The server stops: finish the recording, if there is one."""
        if self._recorder is not None:
            self._recorder.close()

    def _listen(self, tracker: RequestState, request: Request) -> None:
        """Take in controls and hints. What is wrong in them is told in the answer's parameters
        and counted; the first is logged for all."""
        params = getattr(request, "kv_transfer_params", None)
        controls, wrong = parse_controls(params, self._tiers)
        hints, wrong_hints = parse_hints(params)
        tracker.wrong = [*wrong, *wrong_hints][:WRONG_MAX]
        has_ours = isinstance(params, Mapping) and params.get(FIELD) is not None
        tracker.told = has_ours or bool(tracker.wrong)
        tracker.no_load = tracker.no_load or controls.no_load
        tracker.no_store = tracker.no_store or controls.no_store
        self.wrong_values += len(tracker.wrong)
        if tracker.wrong and not self._warned:
            self._warned = True
            logger.warning(
                "kvtiers: in kv_transfer_params of request %s: %s. Further wrong values are told "
                "to the client and counted, not logged",
                request.request_id,
                "; ".join(tracker.wrong[:4]),
            )
        salt = request.cache_salt
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        tracker.origin = RequestOrigin(digest, hints, controls)

    def _record(self, recorder: TraceRecorder, tracker: RequestState, request: Request) -> None:
        tracker.extend(request.block_hashes)
        size = self._layout.groups[self._recorded].chunk_tokens
        keys = tracker.keys[self._recorded].frozen(request.num_prompt_tokens // size)
        hints = tracker.origin.hints
        pinned = min(len(keys), int(min(hints.pinned_tokens, request.num_prompt_tokens) // size))
        told = {**hints.stored, **hints.ended}
        recorder.record(Seen(time.monotonic(), keys, request.num_prompt_tokens, told, pinned))

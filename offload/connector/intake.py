"""What a new request brings along: its identity, whether it may take part, hints for policies,
and a line in the recorded trace."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload.chunks import Origin
from offload.hints import parse_hints
from offload.layout import ModelLayout, recorded_group
from offload.recorder import Seen, TraceRecorder
from offload.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class Intake:
    """Makes trackers. With ``require_salt`` requests without a salt stay outside."""

    def __init__(
        self,
        layout: ModelLayout,
        identity_of: Callable[[Request], bytes],
        *,
        require_salt: bool = False,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._layout = layout
        self._identity_of = identity_of
        self._require_salt = require_salt
        self._recorder = recorder
        self._recorded = layout.groups.index(recorded_group(layout)) if recorder else 0
        self._hints_warned = False

    def admit(self, request: Request) -> RequestTracker:
        """The tracker of a request that was not seen before."""
        identity = self._identity_of(request)
        tracker = RequestTracker(request.request_id, len(self._layout.groups), identity)
        tracker.no_load = tracker.no_store = self._require_salt and not request.cache_salt
        tracker.origin = self._origin(request)
        if self._recorder is not None:
            self._record(self._recorder, tracker, request)
        return tracker

    def close(self) -> None:
        """The server stops: finish the recording, if there is one."""
        if self._recorder is not None:
            self._recorder.close()

    def _origin(self, request: Request) -> Origin:
        """What policies may know of a request. A wrong hint is logged once for all."""
        hints, wrong = parse_hints(getattr(request, "kv_transfer_params", None))
        if wrong and not self._hints_warned:
            self._hints_warned = True
            logger.warning(
                "kvtiers: hints of request %s in kv_transfer_params are ignored: %s. Further wrong "
                "hints are ignored silently",
                request.request_id,
                "; ".join(wrong[:4]),
            )
        salt = request.cache_salt
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        return Origin(digest, hints)

    def _record(self, recorder: TraceRecorder, tracker: RequestTracker, request: Request) -> None:
        tracker.extend(request.block_hashes, self._layout)
        size = self._layout.groups[self._recorded].chunk_tokens
        keys = tuple(tracker.keys[self._recorded][: request.num_prompt_tokens // size])
        hints = tracker.origin.hints
        pinned = min(len(keys), int(min(hints.pinned_tokens, request.num_prompt_tokens) // size))
        told = {**hints.stored, **hints.ended}
        recorder.record(Seen(time.monotonic(), keys, request.num_prompt_tokens, told, pinned))

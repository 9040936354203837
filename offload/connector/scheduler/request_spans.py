"""Sends a span per request through vLLM's tracing. The span shows which tiers served the prompt and
why they did not serve the rest.

Spans are sent only with ``--otlp-traces-endpoint``. vLLM makes its span ``llm_request`` in another
process; our span, ``kv_cache``, has the same parent. It lasts from the moment when vLLM accepted
the hit until the load has ended. vLLM's exporter has its own thread, so nothing waits here.
Attributes that vLLM's issue 53926 proposes have the names proposed there.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.tracing import SpanKind, extract_trace_context, instrument_manual

from offload.requests.miss_reasons import Reason
from offload.requests.request_log import LoggedRequest

logger = logging.getLogger(__name__)

NAME = "kv_cache"
GPU = "gpu"
AHEAD = {
    "ahead_tokens": "kv_cache.ahead_tokens",
    "ahead_late_tokens": "kv_cache.ahead_late_tokens",
    "ahead_saved_s": "kv_cache.ahead_saved_seconds",
    "ahead_wasted_tokens": "kv_cache.ahead_wasted_tokens",
    "waited_s": "kv_cache.read_wait_seconds",
}
"""The attributes that say what look-ahead did, by their names in the log of requests."""


class RequestSpans:
    """A sink of final log entries. Used on vLLM's scheduler thread; never raises."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.dropped = 0

    def __call__(self, logged: LoggedRequest) -> None:
        try:
            self._send(logged, time.time())
        except Exception:  # an exporter's fault must not reach the scheduler
            self.dropped += 1
            if self.dropped == 1:
                logger.exception("kvtiers: a request's span could not be sent")

    def close(self) -> None:
        """Do nothing: vLLM flushes its exporter at the end of the process."""

    def _send(self, logged: LoggedRequest, now_s: float) -> None:
        instrument_manual(
            NAME,
            start_time=int(logged.time_s * 1e9),
            end_time=int(max(now_s, logged.time_s) * 1e9),
            attributes=attributes_of(logged, now_s, self._block_tokens),
            context=extract_trace_context(logged.trace_headers),
            kind=SpanKind.INTERNAL,
        )


def attributes_of(logged: LoggedRequest, now_s: float, block_tokens: int) -> dict[str, Any]:
    """The attributes of a request's span. ``tokens_missed`` and the ``tokens_hit`` of all tiers add
    up to ``prompt_tokens``."""
    hits = {GPU: logged.gpu_tokens, **logged.loaded}
    hits = {tier: tokens for tier, tokens in hits.items() if tokens}
    hit = sum(hits.values())
    found: dict[str, Any] = {
        "kv_cache.request_id": logged.request,
        "kv_cache.prompt_tokens": logged.prompt_tokens,
        "kv_cache.tier_hit": list(hits) or ["none"],
        "kv_cache.tokens_missed": logged.prompt_tokens - hit,
        "kv_cache.blocks_hit": hit // block_tokens,
        "kv_cache.blocks_missed": -(-logged.prompt_tokens // block_tokens) - hit // block_tokens,
    }
    found |= {f"kv_cache.tokens_hit.{tier}": tokens for tier, tokens in hits.items()}
    found["kv_cache.lookup_seconds"] = logged.lookup_s
    if logged.load_s is not None:
        found["kv_cache.load_seconds"] = logged.load_s
    if logged.hit_tokens:
        found["kv_cache.promotion_latency_seconds"] = max(0.0, now_s - logged.time_s)
    found |= {AHEAD[name]: value for name, value in logged.look_ahead().items()}
    if logged.miss.reason is not Reason.COMPLETE:
        found["kv_cache.miss_reason"] = logged.miss.reason.value
    if logged.miss.tier:
        found["kv_cache.miss_tier"] = logged.miss.tier
    return found

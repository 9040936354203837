"""Spans of requests in vLLM's real scheduler, received by an OpenTelemetry collector in process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.tracing import is_tracing_available

from offload.connector.scheduler.request_spans import RequestSpans
from offload.requests.miss_reasons import LoggedRequest
from tests.collector import PROTOCOL, Collector, accounted_tokens, attributes, collecting
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, serve
from tests.oracle.test_requests_reported import _request

if not is_tracing_available():
    pytest.skip(
        "needs OpenTelemetry: pip install opentelemetry-exporter-otlp", allow_module_level=True
    )

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Every engine traces to it."""
    make = oracle_world.make_config
    with collecting() as server:

        def tracing(*arguments: Any) -> Any:
            config, kv_cache_config = make(*arguments)
            config.observability_config.otlp_traces_endpoint = server.url
            return config, kv_cache_config

        monkeypatch.setattr(oracle_world, "make_config", tracing)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", server.url)
        for name, value in PROTOCOL.items():
            monkeypatch.setenv(name, value)
        yield server


def test_spans_account_for_every_token_of_the_prompt(collector: Collector, tmp_path: Path) -> None:
    from opentelemetry import trace
    from vllm.tracing import init_tracer

    init_tracer("kvtiers.test", collector.url)
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as world:
        serve(world, "cold", PROMPT)
        world.forget_locally()
        request = _request(world, "restored", PROMPT, None)
        request.trace_headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        world.scheduler.add_request(request)
        world.drain()
        serve(world, "longer", [*PROMPT, *range(100, 120)])
        world.check_idle()
    provider: Any = trace.get_tracer_provider()
    provider.shutdown()  # sends what waits
    spans = {name: attributes(span) for name, span in collector.spans.items()}
    assert sorted(spans) == ["cold", "longer", "restored"]
    for name, found in spans.items():
        assert accounted_tokens(collector.spans[name]) == found["kv_cache.prompt_tokens"]
    cold, restored, longer = (spans[name] for name in ("cold", "restored", "longer"))
    assert cold["kv_cache.tier_hit"] == ["none"]
    assert (cold["kv_cache.miss_reason"], cold["kv_cache.blocks_hit"]) == ("never_stored", 0)
    assert restored["kv_cache.tier_hit"] == ["cpu"]
    assert restored["kv_cache.tokens_hit.cpu"] == 60
    assert restored["kv_cache.promotion_latency_seconds"] > 0
    assert "kv_cache.promotion_latency_seconds" not in cold
    assert longer["kv_cache.tier_hit"][0] == "gpu"
    span = collector.spans["restored"]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        *("kv_cache", TRACE, PARENT),
    )
    assert span.end_time_unix_nano > span.start_time_unix_nano


def test_a_fault_of_the_exporter_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("offload.connector.scheduler.request_spans.instrument_manual", fails)
    spans = RequestSpans(16)
    for _ in range(2):
        spans(LoggedRequest("a", 0.0, 64, 0))
    assert spans.dropped == 2

"""Spans of requests in vLLM's real scheduler, received by an OpenTelemetry collector in process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.tracing import is_tracing_available

from offload.connector.scheduler.request_spans import AHEAD, RequestSpans, attributes_of
from offload.planner.jobs import Job
from offload.planner.loads import LoadPlanner
from offload.planner.look_ahead.ahead_use import AheadUse
from offload.requests.lookup import Lookups
from offload.requests.miss_reasons import Miss, Reason
from offload.requests.request_log import LoggedRequest
from tests.collector import PROTOCOL, Collector, accounted_tokens, attributes, collecting
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, serve
from tests.oracle.test_requests_reported import _request
from tests.patience import PATIENCE_S

if not is_tracing_available():
    pytest.skip(
        "needs OpenTelemetry: pip install opentelemetry-exporter-otlp", allow_module_level=True
    )

PATIENCE_MS = int(PATIENCE_S * 1000)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Every engine traces to it."""
    from opentelemetry import trace
    from opentelemetry.util._once import Once
    from vllm.tracing import init_tracer

    make = oracle_world.make_config
    with collecting() as server:

        def tracing(*arguments: Any) -> Any:
            config, kv_cache_config = make(*arguments)
            config.observability_config.otlp_traces_endpoint = server.url
            return config, kv_cache_config

        monkeypatch.setattr(oracle_world, "make_config", tracing)
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)  # of an earlier test
        monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", server.url)
        for name, value in PROTOCOL.items():
            monkeypatch.setenv(name, value)
        init_tracer("kvtiers.test", server.url)
        yield server
        provider: Any = trace.get_tracer_provider()
        provider.shutdown()


def sent() -> None:
    """Make vLLM's exporter send what waits."""
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    assert provider.force_flush(PATIENCE_MS)


def test_spans_account_for_every_token_of_the_prompt(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: dict[str, float] = {}
    loaded = LoadPlanner.ended

    def spied(self: LoadPlanner, job: Job, now: float) -> None:
        took[job.request] = job.answer.seconds
        loaded(self, job, now)

    monkeypatch.setattr(LoadPlanner, "ended", spied)
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as world:
        serve(world, "cold", PROMPT)
        world.forget_locally()
        request = _request(world, "restored", PROMPT, None)
        request.trace_headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        world.scheduler.add_request(request)
        world.drain()
        serve(world, "longer", [*PROMPT, *range(100, 120)])
        world.check_idle()
    sent()
    spans = {name: attributes(span) for name, span in collector.spans.items()}
    assert sorted(spans) == ["cold", "longer", "restored"]
    for name, found in spans.items():
        assert accounted_tokens(collector.spans[name]) == found["kv_cache.prompt_tokens"]
    cold, restored, longer = (spans[name] for name in ("cold", "restored", "longer"))
    assert cold["kv_cache.tier_hit"] == ["none"]
    assert (cold["kv_cache.miss_reason"], cold["kv_cache.blocks_hit"]) == ("never_stored", 0)
    assert restored["kv_cache.tier_hit"] == ["cpu"]
    assert restored["kv_cache.tokens_hit.cpu"] == 64
    assert restored["kv_cache.promotion_latency_seconds"] > 0
    assert restored["kv_cache.load_seconds"] == took["restored"] > 0
    assert not {"kv_cache.promotion_latency_seconds", "kv_cache.load_seconds"} & cold.keys()
    assert longer["kv_cache.tier_hit"][0] == "gpu"
    span = collector.spans["restored"]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        *("kv_cache", TRACE, PARENT),
    )
    assert span.end_time_unix_nano > span.start_time_unix_nano


def test_the_time_of_a_lookup_begins_with_the_first_try(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lookups without a result precede the successful one, as if a shared tier had not replied
    yet. The clock advances only in these two, by a second each."""
    waits, now_s = [False, True, True], [1.0]

    def query(*_: Any) -> bool:
        found = bool(waits) and waits.pop(0)
        now_s[0] += found
        return found

    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=time.monotonic, time=time.time)
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as world:
        presence, original = world.planner.presence, Lookups.look_up

        def ask(*arguments: Any) -> int | None:
            with monkeypatch.context() as during:
                during.setattr(presence, "tiers", frozenset({0}))  # else none is queried
                return original(*arguments)

        monkeypatch.setattr(Lookups, "look_up", ask)
        monkeypatch.setattr(Lookups, "_query", query)
        monkeypatch.setattr("offload.requests.lookup.time", clock)
        at_once = serve(world, "at-once", PROMPT)
        world.forget_locally()
        late = serve(world, "late", PROMPT)
    assert waits == []
    sent()
    found = {name: attributes(collector.spans[name]) for name in ("at-once", "late")}
    times = [found[name]["kv_cache.lookup_seconds"] for name in ("at-once", "late")]
    assert times == [at_once.lookup_s, late.lookup_s] == [0.0, 2.0]


def test_a_load_that_failed_has_no_time() -> None:
    logged = LoggedRequest("a", 0.0, 64, 0, 60, 60, miss=Miss(Reason.LOAD_FAILED))
    found = attributes_of(logged, 1.0, 16)
    assert found["kv_cache.promotion_latency_seconds"] == 1.0, "the request waited all the same"
    assert "kv_cache.load_seconds" not in found
    assert found["kv_cache.miss_reason"] == "load_failed"


def test_what_look_ahead_did_is_in_the_span() -> None:
    ahead = AheadUse(tokens=48, late_tokens=16, saved_s=0.25, wasted_tokens=4)
    logged = LoggedRequest("a", 0.0, 64, 0, 60, 60, {"cpu": 60}, ahead=ahead, waited_s=1.5)
    found = attributes_of(logged, 1.0, 16)
    assert {name: value for name, value in found.items() if "ahead" in name or "wait" in name} == {
        "kv_cache.ahead_tokens": 48,
        "kv_cache.ahead_late_tokens": 16,
        "kv_cache.ahead_saved_seconds": 0.25,
        "kv_cache.ahead_wasted_tokens": 4,
        "kv_cache.read_wait_seconds": 1.5,
    }
    plain = attributes_of(LoggedRequest("a", 0.0, 64, 0, 60, 60, {"cpu": 60}), 1.0, 16)
    assert plain.keys() == found.keys() - AHEAD.values()


def test_a_fault_of_the_exporter_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("offload.connector.scheduler.request_spans.instrument_manual", fails)
    spans = RequestSpans(16)
    for _ in range(2):
        spans(LoggedRequest("a", 0.0, 64, 0))
    assert spans.dropped == 2

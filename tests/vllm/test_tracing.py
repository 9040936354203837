"""``vllm serve --otlp-traces-endpoint``: the spans of a real server, received by a collector."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path

import pytest
from vllm.tracing import is_tracing_available

from demo.server import VllmServer
from tests.collector import PROTOCOL, accounted_tokens, attributes, collecting
from tests.patience import PATIENCE_S
from tests.vllm.engine import transfer_config
from tests.vllm.restored import prompts
from tests.vllm.test_server import FLAGS

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def ask(server: VllmServer, prompt: list[int]) -> None:
    """Send a prompt within the client's trace."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    headers = {
        "Content-Type": "application/json",
        "traceparent": f"00-{TRACE}-{PARENT}-01",
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()


@pytest.mark.thorough
@pytest.mark.skipif(not is_tracing_available(), reason="needs opentelemetry-exporter-otlp")
def test_spans_of_a_server_account_for_every_token(llama: Path, tmp_path: Path) -> None:
    [prompt] = prompts(1)
    with collecting() as collector:
        server = VllmServer(
            llama,
            log=tmp_path / "server.log",
            connector=transfer_config({"cpu": {"capacity": "64MiB"}}),
            flags=(*FLAGS, "--otlp-traces-endpoint", collector.url),
            env=PROTOCOL | {"OTEL_BSP_SCHEDULE_DELAY": "100"},
            deadline_s=PATIENCE_S,
        )
        with server:
            ask(server, prompt)
            server.reset_prefix_cache()
            ask(server, prompt)
            ours = collector.wait_for("kv_cache", TRACE, 2)
            theirs = collector.wait_for("llm_request", TRACE, 2)
    assert {span.parent_span_id.hex() for span in [*ours, *theirs]} == {PARENT}
    assert [accounted_tokens(span) for span in ours] == [len(prompt)] * 2
    first, second = map(attributes, ours)
    assert first["kv_cache.tier_hit"] == ["none"]
    assert first["kv_cache.miss_reason"] == "never_stored"
    assert second["kv_cache.tier_hit"] == ["cpu"]
    assert second["kv_cache.promotion_latency_seconds"] > 0
    assert second["kv_cache.load_seconds"] > 0
    assert second["kv_cache.lookup_seconds"] > 0
    assert "kv_cache.load_seconds" not in first

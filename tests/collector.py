"""An OpenTelemetry collector in process: it receives the spans that vLLM's exporter sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.patience import PATIENCE_S

PROTOCOL = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
"""The environment of an exporter that sends to this collector."""


class Collector(ThreadingHTTPServer):
    """``spans`` are those of kvtiers by request; ``received`` are all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.received: list[Any] = []
        self._changed = threading.Condition()

    @property
    def spans(self) -> dict[str, Any]:
        found = [span for span in self.received if span.name == "kv_cache"]
        return {attributes(span)["kv_cache.request_id"]: span for span in found}

    def receive(self, spans: list[Any]) -> None:
        with self._changed:
            self.received += spans
            self._changed.notify_all()

    def wait_for(self, name: str, trace: str, count: int) -> list[Any]:
        """The spans of this name in this trace, once that many have arrived."""

        def found() -> list[Any]:
            named = [span for span in self.received if span.name == name]
            return [span for span in named if span.trace_id.hex() == trace]

        with self._changed:
            has_come = self._changed.wait_for(lambda: len(found()) >= count, PATIENCE_S)
            assert has_come, f"{len(found())} of {count} spans {name}"
            return found()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        body = self.rfile.read(int(self.headers["Content-Length"]))
        found = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        assert isinstance(self.server, Collector)
        scopes = [scope for resource in found.resource_spans for scope in resource.scope_spans]
        self.server.receive([span for scope in scopes for span in scope.spans])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = (
            [inner.string_value for inner in value.values] if kind == "array_value" else value
        )
    return found


def accounted_tokens(span: Any) -> int:
    """The sum of the tokens by tier and of those to compute."""
    found = attributes(span)
    return sum(n for key, n in found.items() if ".tokens_hit." in key or "tokens_missed" in key)

"""Starts, queries and stops a real ``vllm serve``; used by the demo and by the tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
"""Deadline for a start, a request or a stop: far longer than any of them takes, even on a slow
machine."""
LOG_CHARS = 20_000

BASE_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # provides /reset_prefix_cache and /collective_rpc
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # avoids compiling the sampler, which takes 3 s
    # For exact repeatability. With several threads, the lowest bits of vLLM's CPU attention change
    # as soon as any connector is configured (seen with vLLM's own ExampleConnector, on AVX-512).
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

Metrics = dict[str, float]


class ServerError(Exception):
    """Raised if the server did not start, respond or stop in time. The message ends with the last
    lines of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one streamed chat completion. ``ttft_s`` is the time from sending to the first
    generated token. ``cached_tokens`` needs ``--enable-prompt-tokens-details``."""

    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    text: str
    ttft_s: float


class VllmServer:
    """One ``vllm serve`` with all processes that it starts. Its methods raise ``ServerError``.

    ``program`` is the command before the model; ``connector`` is the value of
    ``--kv-transfer-config``; ``flags`` are other flags. A start, a request and a stop may each
    take ``deadline_s``.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        program: Sequence[str] = (sys.executable, "-m", "offload.connector.vllm_cli", "serve"),
        connector: dict[str, Any] | None = None,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.log_path = log
        self._deadline_s = deadline_s
        self.port = free_port()
        command = [*program, str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        command += flags
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | BASE_ENV | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:  # even on Ctrl-C, no process may be left behind
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        """Stream the greedy answer to a conversation."""
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        start = time.perf_counter()
        first: float | None = None
        tokens: list[int] = []
        text: list[str] = []
        usage: dict[str, Any] = {}
        for event in self._stream("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                if choice.get("token_ids"):
                    first = first or time.perf_counter()
                    tokens += choice["token_ids"]
                text.append(choice["delta"].get("content") or "")
            usage = event.get("usage") or usage
        if first is None:
            raise ServerError(f"no token came{self._log_text()}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(usage["prompt_tokens"], cached, tuple(tokens), "".join(text), first - start)

    def complete(self, prompt: Sequence[int], max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """Call ``/v1/completions`` with token ids. Returns the choice of the response, with
        ``token_ids``."""
        choice: dict[str, Any] = self.completion(prompt, max_tokens, **parameters)["choices"][0]
        return choice

    def completion(
        self, prompt: Sequence[int], max_tokens: int, **parameters: Any
    ) -> dict[str, Any]:
        """Like ``complete``, but returns the whole response."""
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | parameters
        answer: dict[str, Any] = json.loads(self._request("POST", "/v1/completions", body))
        return answer

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Empty vLLM's own prefix cache, and with ``external`` also the tiers. Retries while
        transfers in flight still hold blocks."""
        path = f"/reset_prefix_cache?reset_external={'true' if external else 'false'}"
        end = time.monotonic() + self._deadline_s
        while not json.loads(self._request("POST", path))["success"]:
            if time.monotonic() > end:
                raise ServerError(f"the prefix cache cannot be reset{self._log_text()}")
            self.nudge()

    def metrics(self) -> Metrics:
        """Return ``/metrics`` with keys such as ``name{label="value"}``, without the labels engine
        and model_name."""
        return dict(_parse_metrics(self.metrics_page()))

    def metrics_page(self) -> str:
        """Return ``/metrics`` as text."""
        return self._request("GET", "/metrics").decode()

    def nudge(self) -> None:
        """Send a short request, so that the engine runs a step and publishes pending metrics.

        It fills no block. It has more than a few tokens because vLLM 0.32's attention for
        processors with AMX ends in an illegal instruction if fewer than eight come first.
        """
        self.complete([0] * 15, max_tokens=1)

    def call_workers(self, method: str, *arguments: str) -> None:
        """Call a method of every worker."""
        self._request("POST", "/collective_rpc", {"method": method, "args": arguments})

    def stop(self) -> None:
        """Stop the server with SIGTERM, as an operator would; after the deadline, with SIGKILL and
        ``ServerError``."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._deadline_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise ServerError(
                    f"the server did not end {self._deadline_s} s after SIGTERM{self._log_text()}"
                ) from None
        self._kill_group()

    def kill(self) -> None:
        """Send SIGKILL to the server and all processes that it started."""
        self._kill_group()
        self._process.wait(self._deadline_s)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the processes have already ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_until_healthy(self) -> None:
        end = time.monotonic() + self._deadline_s
        while True:
            with contextlib.suppress(OSError, ServerError):  # not started yet
                self._request("GET", "/health")
                return
            if self._process.poll() is not None:
                raise ServerError(
                    f"vllm serve ended with {self._process.returncode}{self._log_text()}"
                )
            if time.monotonic() > end:
                raise ServerError(f"not healthy after {self._deadline_s} s{self._log_text()}")
            time.sleep(0.2)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with self._response(method, path, body) as response:
            return response.read()

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._response("POST", path, body) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    yield json.loads(data)

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._deadline_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            try:
                connection.request(method, path, json.dumps(body) if body else None, headers)
                response = connection.getresponse()
                if response.status != 200:
                    said = response.read().decode(errors="replace")
                    raise ServerError(
                        f"{method} {path}: {response.status} {said}{self._log_text()}"
                    )
                yield response
            except http.client.HTTPException as error:  # it was killed in the middle of an answer
                raise ServerError(f"{method} {path}: {error!r}{self._log_text()}") from error

    def _log_text(self) -> str:
        end = self.log_path.read_text(errors="replace")[-LOG_CHARS:]
        return f"\n--- end of {self.log_path} ---\n{end}"


def _parse_metrics(text: str) -> Iterator[tuple[str, float]]:
    """Parses lines of the Prometheus text format: ``name{labels} value``."""
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        series, value = line.rsplit(" ", 1)
        name, _, labels = series.partition("{")
        own = [
            label
            for label in labels.rstrip("}").split('",')
            if label and not label.startswith(("engine=", "model_name="))
        ]
        inside = ",".join(label.rstrip('"') + '"' for label in own)
        yield (f"{name}{{{inside}}}" if inside else name), float(value)

"""``kvtiers top`` on pages of a simulated server; tests/vllm uses a real one."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from offload.admin import metrics_client
from offload.admin.metrics_client import PageError, metrics_url, parse, view
from offload.cli import common
from offload.cli.top import COUNT_NAMES
from tests.offload.cli.rank_folders import ROOT, kvtiers, make_rank_folder
from tests.patience import PATIENCE_S

LABELS = ["model_name", "engine"]


class Server:
    """The metrics of a server with two engines, a CPU tier and an LMDB tier."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.made: dict[str, Counter | Gauge] = {}

    def add(self, kind: type, name: str, value: float, tier: str = "", engine: str = "0") -> None:
        labels = [*LABELS, *(["tier"] if tier else [])]
        if name not in self.made:
            self.made[name] = kind(name, "help", labels, registry=self.registry)
        values = ["tiny", engine, *([tier] if tier else [])]
        metric = self.made[name].labels(*values)
        metric.inc(value) if kind is Counter else metric.set(value)

    def miss(self, reason: str, value: float, engine: str) -> None:
        if "misses" not in self.made:
            labels = [*LABELS, "reason"]
            made = Counter("vllm:kvtiers_misses", "help", labels, registry=self.registry)
            self.made["misses"] = made
        self.made["misses"].labels("tiny", engine, reason).inc(value)

    def fill(self) -> None:
        self.miss("evicted", 3, "0")
        self.miss("evicted", 4, "1")
        self.miss("never_stored", 20, "0")
        for engine in ("0", "1"):
            self.add(Counter, "vllm:kvtiers_loaded_tokens", 320, "lmdb", engine)
            self.add(Gauge, "vllm:kvtiers_resident_chunks", 7, "cpu", engine)
            self.add(Gauge, "vllm:num_requests_running", 2, engine=engine)
        self.add(Counter, "vllm:kvtiers_read_bytes", 1000, "lmdb")
        self.add(Gauge, "vllm:kvtiers_used_ratio", 0.25, "cpu", "0")
        self.add(Gauge, "vllm:kvtiers_used_ratio", 0.75, "cpu", "1")
        self.add(Gauge, "vllm:kvtiers_breaker_state", 0, "lmdb", "0")
        self.add(Gauge, "vllm:kvtiers_breaker_state", 2, "lmdb", "1")
        self.add(Gauge, "vllm:kvtiers_break_even", 1, "lmdb", "0")
        self.add(Counter, "vllm:kvtiers_corrupt_records", 3)
        self.add(Counter, "vllm:external_prefix_cache_hits", 50)
        self.add(Counter, "vllm:external_prefix_cache_queries", 200)

    @property
    def page(self) -> str:
        return generate_latest(self.registry).decode()


@contextmanager
def serving(pages: list[str], user: str = "") -> Iterator[str]:
    """An HTTP server that returns one page after the other, the last one repeatedly; only to
    ``user``, given as ``name:password``, if there is one."""
    wanted = f"Basic {base64.b64encode(user.encode()).decode()}" if user else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (pages.pop(0) if len(pages) > 1 else pages[0]).encode()
            is_allowed = self.headers["Authorization"] == wanted
            found = 200 if self.path == "/metrics" else 404
            self.send_response(found if is_allowed else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_totals_of_one_page() -> None:
    server = Server()
    server.fill()
    found = view(parse(server.page, 10.0))
    cpu, lmdb = found.tiers
    assert (cpu.name, cpu.resident_chunks, cpu.used_ratio) == ("cpu", 14, 0.5)
    assert (lmdb.name, lmdb.loaded_tokens, lmdb.breaker, lmdb.pays) == (
        "lmdb",
        640,
        "open",
        True,
    )
    assert (found.running, found.waiting) == (4, None)
    assert (found.hit_ratio, found.hit_ratio_since_start) == (None, 0.25)
    assert found.counts["corrupt_records_total"] == 3
    assert found.misses == {"evicted": 7, "never_stored": 20}
    assert found.counts["tier_errors_total"] is None
    assert cpu.capacity_bytes is cpu.queue_depth is cpu.breaker is None
    assert lmdb.rates["loaded_tokens_per_s"] is None


def test_rates_are_over_the_time_between_two_pages() -> None:
    server = Server()
    server.fill()
    before = parse(server.page, 10.0)
    server.add(Counter, "vllm:kvtiers_loaded_tokens", 500, "lmdb")
    server.add(Counter, "vllm:kvtiers_write_bytes", 900, "lmdb")  # new since
    server.add(Counter, "vllm:external_prefix_cache_hits", 30)
    server.add(Counter, "vllm:external_prefix_cache_queries", 40)
    found = view(parse(server.page, 15.0), before)
    rates = found.tiers[1].rates
    assert rates["loaded_tokens_per_s"] == 100
    assert rates["write_bytes_per_s"] == 180
    assert rates["read_bytes_per_s"] == 0
    assert (found.hit_ratio, found.seconds) == (0.75, 5.0)
    restarted = view(before, parse(server.page, 5.0))
    assert restarted.tiers[1].rates["loaded_tokens_per_s"] == 640 / 5


def test_one_view_as_json_and_as_a_table() -> None:
    server = Server()
    server.fill()
    first = server.page
    server.add(Counter, "vllm:kvtiers_read_bytes", 10**6, "lmdb")
    with serving([first, server.page]) as address:
        found = kvtiers("top", address, "--interval", "0.1", "--json").json
        assert found["url"] == f"http://{address}/metrics"
        assert found["tiers"][1]["rates"]["read_bytes_per_s"] > 10**5
        text = kvtiers("top", f"http://{address}/", "--once", "--interval", "0").out
    for words in ("cpu", "lmdb", "breaker: open", "50.0%", "corrupt records 3", "25.0% since",
                  "because   never_stored 20, evicted 7"):  # fmt: skip
        assert words in text, words


def test_look_ahead_is_shown_once_it_has_read_something() -> None:
    server = Server()
    server.fill()
    names = ("ahead_read_bytes", "ahead_used_bytes", "ahead_late_bytes", "ahead_wasted_bytes")
    for name in names:
        server.add(Counter, f"vllm:kvtiers_{name}", 0)
    with serving([server.page]) as address:
        assert "look-ahead" not in kvtiers("top", address, "--once", "--interval", "0").out
    for name, count in zip(names, (1000, 800, 300, 150), strict=True):
        server.add(Counter, f"vllm:kvtiers_{name}", count)
    before = parse(server.page, 10.0)
    server.add(Counter, "vllm:kvtiers_ahead_read_bytes", 1000)
    server.add(Counter, "vllm:kvtiers_ahead_saved_seconds", 12.5)
    found = view(parse(server.page, 12.0), before)
    assert found.rates["ahead_read_bytes_per_s"] == 500
    assert found.ahead_shares == {"used": 0.4, "late": 0.15, "wasted": 0.075}
    with serving([server.page]) as address:
        text = kvtiers("top", address, "--once", "--interval", "0").out
    text = " ".join(text.split())
    assert "read ahead; since the start 40.0% used, 15.0% late, 7.5% wasted, 12.5 s saved" in text


def test_a_busy_server_is_readable_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for each tier: every line has its label, and no number is wrapped."""
    server = Server()
    server.fill()
    first = server.page
    for tier in ("cpu", "lmdb", "lmdb_translated"):
        server.add(Gauge, "vllm:kvtiers_used_bytes", 999.4 * 2**30, tier)
        server.add(Gauge, "vllm:kvtiers_capacity_bytes", 1234567890123, tier)
        server.add(Gauge, "vllm:kvtiers_queue_depth", 128, tier)
        for name in ("loaded_tokens", "hit_tokens", "missed_tokens", "stored_chunks"):
            server.add(Counter, f"vllm:kvtiers_{name}", 10**7, tier)
        for name in ("evicted_chunks", "read_bytes", "write_bytes"):
            server.add(Counter, f"vllm:kvtiers_{name}", 10**9, tier)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # this makes rich treat it as a terminal
    monkeypatch.setenv("COLUMNS", "80")
    with serving([first, server.page]) as address:
        text = kvtiers("top", address, "--once", "--interval", "0.2").out
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith(" " * 10)] == [], "a value was wrapped"
    starts = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert starts == ["requests", "hits", "misses", "faults", "cpu", "lmdb", "lmdb_translated"]
    assert sum("999GiB of 1.12TiB" in line for line in lines) == 3


def test_a_line_that_is_too_long_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of the wide output is missing on a terminal of 80 columns."""
    server = Server()
    server.fill()
    for name in COUNT_NAMES:
        server.add(Counter, f"vllm:kvtiers_{name.removesuffix('_total')}", 10**9)
    with serving([server.page]) as address:
        words = ("top", address, "--once", "--interval", "0")
        wide = kvtiers(*words).out
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("COLUMNS", "80")
        text = re.sub("\x1b\\[[0-9;]*m", "", kvtiers(*words).out)
    assert max(map(len, wide.splitlines())) > 80
    assert max(map(len, text.splitlines())) <= 80
    assert text.split() == wide.split()


@pytest.mark.parametrize("interval", ["inf", "nan", "-1", "1e300"])
def test_an_interval_that_never_ends(interval: str) -> None:
    with serving([Server().page]) as address:
        result = kvtiers("top", address, "--once", "--interval", interval)
    assert result.code == 2
    assert "Invalid value for '--interval'" in result.err


def test_top_writes_one_view_after_the_other_into_a_pipe() -> None:
    """``top`` runs until it is stopped, or until its output is closed."""
    server = Server()
    server.fill()
    with serving([server.page]) as address:
        words = [sys.executable, "-m", "offload.cli", "top", address, "--interval", "0.2"]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            heads = 0
            for line in process.stdout:
                heads += line.startswith("requests") and "4 running" in line
                if heads == 3:
                    break
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
    assert heads == 3, "it ended before it was stopped"
    assert process.returncode == 130


def test_a_server_without_this_connector() -> None:
    server = Server()
    server.add(Gauge, "vllm:num_requests_running", 1)
    for page, words in (
        (server.page, "metrics of vLLM, but none of kvtiers. Start the server with"),
        ("", "no metrics of vLLM"),
        ("vllm:x{ 3", "does not contain Prometheus metrics"),
    ):
        with serving([page]) as address:
            result = kvtiers("top", address, "--once")
        assert result.code == 1
        assert words in result.err
        assert address in result.err


def test_a_server_that_does_not_run() -> None:
    with serving([""]) as address:
        pass
    result = kvtiers("top", address, "--once")
    assert result.code == 1
    assert f"http://{address}/metrics does not answer" in result.err
    assert "\n" not in result.err.strip()


@pytest.mark.parametrize(
    "command", ["top ADDRESS", "top ADDRESS --json", "inspect KV --server ADDRESS"]
)
def test_a_silent_server_is_named_before_the_command_gives_up(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rank_folder(tmp_path, range(2))
    monkeypatch.setattr(common, "SLOW_AFTER_S", 0.05)
    fetch = metrics_client.fetch

    def impatient(url: str) -> str:
        for thread in threading.enumerate():
            if getattr(thread, "function", None) is print:  # the timer of the first line
                thread.join(PATIENCE_S)
        return fetch(url, timeout_s=0.1)

    monkeypatch.setattr(metrics_client, "fetch", impatient)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        words = command.replace("ADDRESS", address).replace("KV", str(tmp_path)).split()
        result = kvtiers(*words)
    assert (result.code, result.out) == (1, "")
    first, last = result.err.splitlines()
    name = f"kvtiers {words[0]}: http://{address}/metrics"
    assert first == f"{name} has not answered for 0.05 s; waiting up to 10 s"
    assert last == f"{name} does not answer: timed out"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nshort",
    ],
)
def test_a_port_without_a_web_server(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            peer = listener.accept()[0]
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = kvtiers("top", address, "--once", "--interval", "0")
        thread.join()
    assert result.code == 1
    assert f"http://{address}/metrics answers, but not like a web server" in result.err


def test_a_page_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part comes within the time limit, but not the whole page."""
    impatient = functools.partial(metrics_client.fetch, timeout_s=0.5)
    monkeypatch.setattr(metrics_client, "fetch", impatient)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            peer = listener.accept()[0]
            with peer, contextlib.suppress(OSError):
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(100):
                    time.sleep(0.05)
                    peer.sendall(b"# nothing\n")

        thread = threading.Thread(target=drip)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = kvtiers("top", address, "--once", "--interval", "0")
        thread.join()
    assert result.code == 1
    assert f"http://{address}/metrics does not answer: timed out" in result.err


def test_a_redirect_without_end_is_reported_in_one_line() -> None:
    with redirecting() as address:
        result = kvtiers("top", address, "--once")
    assert result.code == 1
    assert f"http://{address}/metrics answers 302 " in result.err
    assert "\n" not in result.err.strip()


@contextmanager
def redirecting() -> Iterator[str]:
    """A port that answers every request with a redirect to itself."""
    with serving([""]) as address:
        original = http.server.BaseHTTPRequestHandler.send_response

        def redirect(handler: http.server.BaseHTTPRequestHandler, _code: int) -> None:
            original(handler, 302)
            handler.send_header("Location", handler.path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http.server.BaseHTTPRequestHandler, "send_response", redirect)
            yield address


@pytest.mark.parametrize("number", ["NaN", "+Inf", "1e400"])
def test_invalid_numbers_are_treated_as_missing(number: str) -> None:
    page = (
        'vllm:kvtiers_resident_chunks{tier="cpu"} 3\n'
        f'vllm:kvtiers_breaker_state{{tier="cpu"}} {number}\n'
    )
    with serving([page]) as address:
        found = kvtiers("top", address, "--json", "--interval", "0").json
    assert found["tiers"][0]["breaker"] is None
    assert found["tiers"][0]["resident_chunks"] == 3


@pytest.mark.parametrize("url", ["local host:1", "ftp://x", "http://", "host:port", ""])
def test_an_invalid_address_is_refused(url: str) -> None:
    result = kvtiers("top", url, "--once")
    assert result.code == 2
    assert "Write localhost:8000" in result.err


def test_all_forms_of_addresses() -> None:
    assert metrics_url("h:1") == "http://h:1/metrics"
    assert metrics_url("https://h/") == "https://h/metrics"
    assert metrics_url("http://h:1/prometheus/metrics") == "http://h:1/prometheus/metrics"


def test_a_server_without_such_a_page() -> None:
    with serving([""]) as address:
        result = kvtiers("top", f"http://{address}/other", "--once")
    assert result.code == 1
    assert f"http://{address}/other answers 404 " in result.err


def test_a_password_is_sent_and_never_shown(tmp_path: Path) -> None:
    make_rank_folder(tmp_path, range(2))
    server = Server()
    server.fill()
    with serving([server.page], user="me:s/ecret") as address:
        good, bad = f"http://me:s%2Fecret@{address}", f"http://me:s%2Fecre@{address}"
        commands = [("top", good, "--json", "--interval", "0"), ("top", good, "--once")]
        commands.append(("inspect", str(tmp_path), "--server", good, "--json"))
        allowed = [kvtiers(*command) for command in commands]
        refused = [kvtiers("top", bad, "--once"), kvtiers("top", f"{address}", "--once")]
        refused.append(kvtiers("inspect", str(tmp_path), "--server", bad))
    assert allowed[0].json["url"] == f"http://{address}/metrics"
    assert allowed[2].json["server"]["url"] == f"http://{address}/metrics"
    assert [result.code for result in allowed] == [0] * 3
    for result in refused:
        assert (result.code, result.out) == (1, "")
        assert f"http://{address}/metrics answers 401 " in result.err
    for wrong in (
        "http://me:s/ecre@h:1",
        "me:s/ecre@h h",
        "http://me:s/ecre",
        "http://me:secre@h:x",
    ):
        result = kvtiers("top", wrong)
        assert (result.code, result.out) == (2, "")
        refused.append(result)
    for result in allowed + refused:
        assert "ecre" not in (result.out + result.err).replace('(got "http://me:s/ecre")', "")


def test_invalid_pages_are_reported() -> None:
    with pytest.raises(PageError):
        parse("<html>", 0.0)

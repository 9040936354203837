"""``vllm serve`` with the engine in a separate process: requests over HTTP, restored blocks, a
SIGKILL while it stores, and configurations that it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from demo.server import BASE_ENV, ROOT, ServerError, VllmServer
from offload.cli import app
from offload.config.kv_transfer_config import ALIASES, NAME
from offload.telemetry.metrics import METRICS
from tests.dashboards import queries
from tests.model_runner import IS_V2
from tests.patience import PATIENCE_S
from tests.processor import ISA, ODD
from tests.promql import problems
from tests.vllm.engine import transfer_config
from tests.vllm.operated import operate, operate_at_rest
from tests.vllm.restored import config, prompts

FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--kv-cache-memory-bytes=8388608",
    "--max-model-len=2048",
    "--prefix-caching-hash-algo=sha256_cbor",
    "--enable-prompt-tokens-details",
)
ASKED = prompts(3)


SERVE = "tests.vllm.serve_cli" if IS_V2 or ISA == ODD else "offload.connector.vllm_cli"
"""The module that runs ``vllm serve``."""


def start(model: Path, tmp_path: Path, name: str, connector: dict[str, Any] | None) -> VllmServer:
    return VllmServer(
        model,
        log=tmp_path / f"{name}.log",
        program=(sys.executable, "-m", SERVE, "serve"),
        connector=connector,
        flags=FLAGS,
        deadline_s=PATIENCE_S,
    )


Answers = dict[tuple[int, int], tuple[Any, Any]]
"""Token ids and log-probabilities, by prompt number and number of cached tokens: with other hits
the rest is computed in other pieces, and the last bits may differ."""


def answers(server: VllmServer) -> Answers:
    """Send every prompt."""
    found = {}
    for number, prompt in enumerate(ASKED):
        answer = server.completion(prompt, 8, logprobs=5)
        [choice], details = answer["choices"], answer["usage"]["prompt_tokens_details"] or {}
        hit = number, details.get("cached_tokens") or 0
        found[hit] = choice["token_ids"], choice["logprobs"]["top_logprobs"]
    return found


def same(found: Answers, reference: Answers) -> bool:
    """True if there are answers that can be compared, and all of these are equal."""
    common = found.keys() & reference.keys()
    return bool(common) and all(found[hit] == reference[hit] for hit in common)


def all_loads_were_right(server: VllmServer) -> bool:
    """True if ``verify`` has compared loaded chunks and found no difference."""
    server.nudge()
    found = server.metrics()
    names = ("verified", "differing", "unverified")
    counts = [found[f"vllm:kvtiers_{name}_chunks_total"] for name in names]
    return counts[0] > 0 and counts[1:] == [0, 0]


def loaded(server: VllmServer, tier: str) -> float:
    server.nudge()
    return server.metrics().get(f'vllm:kvtiers_loaded_tokens_total{{tier="{tier}"}}', 0.0)


def until_stored(server: VllmServer) -> None:
    """Wait until the disk holds every chunk of the CPU tier. A hit on fewer chunks would have a
    length for which there is no reference."""
    names = [f'vllm:kvtiers_resident_chunks{{tier="{tier}"}}' for tier in ("cpu", "lmdb")]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        server.nudge()
        found = server.metrics()
        cpu, disk = (found.get(name, 0.0) for name in names)
        if disk >= cpu > 0.0:
            return
        assert time.monotonic() < deadline, f"{disk:.0f} of {cpu:.0f} chunks are on the disk"
        time.sleep(0.05)


@contextlib.contextmanager
def traffic(server: VllmServer) -> Iterator[None]:
    """Keep other prompts in flight while the body runs; errors of a killed server are expected."""

    def ask(number: int) -> None:
        with contextlib.suppress(ServerError, OSError):
            server.complete(prompts(1, seed=100 + number)[0], max_tokens=4)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)


def page_of(server: VllmServer) -> dict[str, set[str]]:
    """Names and labels of every series on the metrics page. A metric without any value yet appears
    only by name, with its declared labels."""
    declared = {metric.shown_as(name): set(metric.labels) for name, metric in METRICS.items()}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.metrics_page()):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = declared.get(name, set()) | {"engine", "model_name"}
        for sample in family.samples:
            own = set(sample.labels) - {"engine", "model_name"}
            assert own == declared.get(sample.name, own), f"{sample.name} has labels {own}"
            found[sample.name] = set(sample.labels)
    return found


def controls_are_answered(server: VllmServer) -> None:
    """A client's controls over HTTP are obeyed, and the answer reports the result."""
    server.reset_prefix_cache()
    controls = {"max_load_tokens": 64, "pin_s": 60, "no_load": "perhaps"}
    answer = server.completion(ASKED[0], 1, kv_transfer_params={"kvtiers": controls})
    report = answer["kv_transfer_params"]["kvtiers_report"]
    assert report["loaded_tokens"] == {"cpu": 64}
    assert report["pinned_tokens"] == 576  # whole chunks of 600 tokens
    assert "no_load must be true or false" in report["ignored"][0]
    for wrong in (7, [], {"tiers": {"read": 7}}, {"pin_s": 1e308}, {"": {}}, {"session": {}}):
        answer = server.completion(ASKED[0], 1, kv_transfer_params={"kvtiers": wrong})
        assert answer["kv_transfer_params"]["kvtiers_report"]["ignored"]


def misses_are_recorded(file: Path) -> None:
    """Read the file of a running server with the command line, until the server has written all
    records."""
    deadline = time.monotonic() + PATIENCE_S
    reasons: set[str] = set()
    while not reasons >= {"never_stored", "complete", "filtered"}:
        assert time.monotonic() < deadline, reasons
        time.sleep(0.05)
        shown = CliRunner().invoke(app, ["why", str(file), "--json", "--last", "1000"])
        assert shown.exit_code == 0, shown.output
        records = json.loads(shown.output)["requests"]
        reasons = {record["reason"] for record in records}
    assert any(record["loaded_tokens"].get("cpu", 0) > 500 for record in records)


def test_http_restart_and_kill_9(llama: Path, tmp_path: Path) -> None:
    """The reference is the answers that the first server computes while its tiers are empty.
    ``test_serve`` compares such answers with those of vLLM without offloading."""
    verify = {"verify": "device", "verify_path": str(tmp_path / "digests")}
    requests = str(tmp_path / "requests.jsonl")
    connector = config(tmp_path / "kv", record_requests=requests, **verify)
    with start(llama, tmp_path, "first", connector) as server:
        reference = answers(server) | answers(server)
        assert loaded(server, "cpu") == 0
        server.reset_prefix_cache()
        assert same(answers(server), reference)
        assert loaded(server, "cpu") > 0
        assert all_loads_were_right(server)
        controls_are_answered(server)
        misses_are_recorded(tmp_path / "requests.jsonl")
        until_stored(server)
        with traffic(server):
            server.kill()
    with start(llama, tmp_path, "second", connector) as server:
        assert same(answers(server), reference)
        assert loaded(server, "lmdb") > 0
        assert all_loads_were_right(server)
        page = page_of(server)
        assert {"vllm:kvtiers_resident_chunks", "vllm:kvtiers_used_ratio"} <= page.keys()
        assert page["vllm:kvtiers_hook_seconds_total"] == {"hook", "engine", "model_name"}
        for where, query in queries():
            assert problems(query, page, {"instance", "job"}) == [], where
        with traffic(server):
            operate(server, tmp_path / "kv", tmp_path / "kv.export")
        server.reset_prefix_cache()
        assert same(answers(server), reference)
        server.reset_prefix_cache(external=True)
        before = loaded(server, "cpu") + loaded(server, "lmdb")
        assert same(answers(server), reference)
        assert loaded(server, "cpu") + loaded(server, "lmdb") == before
        server.stop()
    assert not list((tmp_path / "kv").rglob("quarantine*"))
    operate_at_rest(tmp_path / "kv", tmp_path / "kv.export", tmp_path / "copy")


@pytest.mark.skipif(not IS_V2, reason="under V1, the test of a restart shows this and more")
def test_one_prompt_is_restored_under_v2(llama: Path, tmp_path: Path) -> None:
    """The prompt is restored in the process that a real server starts for its engine. The next
    server restores it from the disk, after the first one was killed while it stored."""
    verify = {"verify": "device", "verify_path": str(tmp_path / "digests")}
    connector = config(tmp_path / "kv", **verify)
    with start(llama, tmp_path, "v2", connector) as server:
        cold = server.completion(ASKED[0], 4)["choices"][0]
        assert loaded(server, "cpu") == 0
        server.reset_prefix_cache()
        restored(server, "cpu", cold)
        until_stored(server)
        with traffic(server):
            server.kill()
    with start(llama, tmp_path, "v2", connector) as server:
        restored(server, "lmdb", cold)
    assert (tmp_path / "v2.log").read_text().count("Using V2 Model Runner") >= 2


def restored(server: VllmServer, tier: str, cold: dict[str, Any]) -> None:
    """The first prompt is restored from a tier, and the answer is the same as without it."""
    answer = server.completion(ASKED[0], 4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 576
    assert answer["choices"][0]["token_ids"] == cold["token_ids"]
    assert loaded(server, tier) == 576
    assert all_loads_were_right(server)


@pytest.mark.thorough
def test_every_problem_of_a_configuration_is_reported_at_once(llama: Path, tmp_path: Path) -> None:
    bad = transfer_config(
        {
            "cpu": {"capacity": "forty"},
            "tiers": [{"type": "lmdb", "path": "/proc/kv", "capacity": "1GiB", "polcy": "lru"}],
        }
    )
    for name in (NAME, *ALIASES):
        transfer = bad | {"kv_connector": name}
        command = [sys.executable, "-m", "offload.connector.vllm_cli", "serve", str(llama), *FLAGS]
        done = subprocess.run(
            [*command, "--kv-transfer-config", json.dumps(transfer)],
            cwd=ROOT,
            env=os.environ | BASE_ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 2, done.stdout
        head, *problems = done.stdout.splitlines()[-4:]
        assert head == "kvtiers: 3 problems in kv_connector_extra_config:"
        wheres = [line.split(":")[0].strip() for line in problems]
        assert wheres == ["$.cpu.capacity", "$.tiers[0].polcy", "$.tiers[0].path"]
        for early in ("EngineCore", "Initializing", "Traceback"):
            assert early not in done.stdout, (
                "something was loaded, or the message is hidden among others"
            )


@pytest.mark.thorough
def test_kvtiers_serve_restores_blocks_from_both_tiers(llama: Path, tmp_path: Path) -> None:
    """With two flags and no JSON, the second server finds the blocks that the first one has left on
    the disk."""
    flags = (*FLAGS, "--kv-cpu", "64MiB", "--kv-disk", f"{tmp_path / 'kv'}:256MiB")
    program = (sys.executable, "-m", "tests.vllm.patient_cli", "serve")
    reference: Answers = {}
    for name, tier in (("first", "cpu"), ("second", "lmdb")):
        log = tmp_path / f"{name}.log"
        with VllmServer(
            llama, log=log, program=program, flags=flags, deadline_s=PATIENCE_S
        ) as server:
            reference = reference or answers(server) | answers(server)
            assert same(answers(server), reference)
            server.reset_prefix_cache()
            assert same(answers(server), reference)
            assert loaded(server, tier) > 0
            until_stored(server)
        assert "kvtiers serve: added --kv-transfer-config" in log.read_text()

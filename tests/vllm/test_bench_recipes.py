"""``vllm bench serve`` with the commands of the guide, but smaller numbers.

The second run loads what the first has stored.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from demo.server import BASE_ENV, VllmServer
from tests.offload.cli.test_guide import PAGES, commands_in
from tests.patience import PATIENCE_S
from tests.vllm.engine import transfer_config
from tests.vllm.test_server import FLAGS, all_loads_were_right, loaded

SMALLER = {
    "--prefix-repetition-prefix-len": "256",
    "--prefix-repetition-suffix-len": "64",
    "--prefix-repetition-num-prefixes": "4",
    "--prefix-repetition-output-len": "4",
    "--num-prompts": "12",
    "--request-rate": "inf",
    "--timed-trace-chunk-hash-size": "64",
}
COMMANDS = [c for c in commands_in(PAGES["measure-your-server.md"]) if "vllm bench serve" in c]


def trace(path: Path) -> Path:
    """Twelve requests that share their first two or three chunks of 64 tokens."""
    rows = [
        {"timestamp": 100 * n, "input_length": 224, "output_length": 4,
         "hash_ids": [1, 2, 3 + n % 3, 10 + n]}
        for n in range(12)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(command: str, server: VllmServer, model: Path, folder: Path) -> None:
    """Run a command of the guide with smaller numbers against this server."""
    seed, vllm, *words = shlex.split(command.replace("\\\n", " "))
    assert vllm == "vllm"
    for option, value in SMALLER.items():
        if option in words:
            words[words.index(option) + 1] = value
    places = {"MODEL": "tiny", "trace.jsonl": str(trace(folder / "trace.jsonl"))}
    words = [places.get(word, word) for word in words]
    words += ["--base-url", f"http://127.0.0.1:{server.port}", "--tokenizer", str(model)]
    name, value = seed.split("=")
    done = subprocess.run(
        [sys.executable, "-m", "offload.connector.vllm_cli", *words],
        env=os.environ | BASE_ENV | {name: value},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["Successful", "requests:", "12"] in lines, done.stdout
    assert ["Failed", "requests:", "0"] in lines


@pytest.mark.thorough
def test_the_benchmarks_of_the_guide_run_and_hit(llama: Path, tmp_path: Path) -> None:
    assert len(COMMANDS) == 2
    verify = {"verify": "device", "verify_path": str(tmp_path / "digests")}
    extra = {"cpu": {"capacity": "64MiB"}, **verify}
    connector = transfer_config(extra)
    log = tmp_path / "server.log"
    with VllmServer(llama, log=log, connector=connector, flags=FLAGS) as server:
        for command in COMMANDS:
            before = loaded(server, "cpu")
            run(command, server, llama, tmp_path)
            assert loaded(server, "cpu") == before, "vLLM's own cache holds what was shared"
            server.reset_prefix_cache()
            run(command, server, llama, tmp_path)
            assert loaded(server, "cpu") > before
        assert all_loads_were_right(server)

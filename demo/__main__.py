"""``./run demo``: a conversation with a real vLLM server whose KV cache has a CPU and a disk tier.

1. Plain vLLM answers the conversation: the reference for the tokens, and for the time that it
   takes to compute every prompt in full.
2. vLLM with this project's connector answers the same. Then vLLM's own prefix cache is emptied
   before every request, so that the prompts come back from the CPU tier.
3. The server is stopped and started again: the prompts come back from the disk.

Greedy tokens of a restored prompt are compared with those of plain vLLM whose own prefix cache held
the same tokens. Exit code 0: all equal, and something came from the CPU and from the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.conversation import ANSWER_TOKENS, QUESTIONS, SYSTEM
from demo.server import ROOT, Answer, ServerError, VllmServer
from demo.sources import Sources, read_sources, wait_until_on_disk
from demo.tiny_model import make_llama

FOLDER = ROOT / ".demo"
FLAGS = (
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--block-size=32",
    "--kv-cache-memory-bytes=67108864",
)
Messages = list[dict[str, str]]

log = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One request with offloading. ``ttft_computed_s``: plain vLLM, nothing cached."""

    phase: str
    turn: int
    prompt_tokens: int
    sources: Sources
    ttft_s: float
    ttft_computed_s: float
    tokens_equal: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """What plain vLLM answers to each turn: in the conversation, with its prefix cache warm, and
    with an empty one."""

    requests: list[Messages]
    talk: list[Answer]
    warm: list[Answer]
    cold: list[Answer]


def connector_config(folder: Path) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of the demo: a CPU tier above LMDB in ``folder``."""
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "512MiB", "policy": "lru"},
            "tiers": [{"type": "lmdb", "path": str(folder), "capacity": "1GiB", "policy": "lru"}],
        },
    }


def run_reference(model: Path) -> Reference:
    """Answer the conversation with plain vLLM, which also fixes the text of all requests."""
    requests: list[Messages] = []
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    talk: list[Answer] = []
    with VllmServer(model, log=FOLDER / "plain.log", flags=FLAGS) as server:
        server.nudge()  # the first request of a server pays for lazy initialisation
        for question in QUESTIONS:
            messages = [*messages, {"role": "user", "content": question}]
            requests.append(messages)
            talk.append(server.chat(messages, ANSWER_TOKENS))
            messages = [*messages, {"role": "assistant", "content": talk[-1].text}]
        warm = [server.chat(request, ANSWER_TOKENS) for request in requests]
        cold = []
        for request in requests:
            server.reset_prefix_cache()
            cold.append(server.chat(request, ANSWER_TOKENS))
    return Reference(requests, talk, warm, cold)


def ask_all(
    server: VllmServer, phase: str, reference: Reference, wanted: list[Answer], reset: bool
) -> list[Row]:
    """Ask every request of the reference, with ``reset`` after emptying vLLM's own cache."""
    rows = []
    for turn, request in enumerate(reference.requests):
        if reset:
            server.reset_prefix_cache()
        before = server.metrics()
        answer = server.chat(request, ANSWER_TOKENS)
        sources = read_sources(server, before, answer.prompt_tokens)
        equal = answer.tokens == wanted[turn].tokens
        cold_s = reference.cold[turn].ttft_s
        rows.append(
            Row(phase, turn + 1, answer.prompt_tokens, sources, answer.ttft_s, cold_s, equal)
        )
    return rows


def run_offloaded(model: Path, reference: Reference) -> list[Row]:
    """The conversation with offloading, before and after a restart."""
    connector = connector_config(FOLDER / "kv")
    server_log = FOLDER / "offload.log"
    with VllmServer(model, log=server_log, flags=FLAGS, connector=connector) as server:
        server.nudge()
        rows = ask_all(server, "conversation", reference, reference.talk, reset=False)
        wait_until_on_disk(server)
        rows += ask_all(server, "cache emptied", reference, reference.warm, reset=True)
        wait_until_on_disk(server)
    log.print("starting vLLM with offloading again (30 to 60 s)")
    with VllmServer(model, log=server_log, flags=FLAGS, connector=connector) as server:
        server.nudge()
        rows += ask_all(server, "restarted", reference, reference.warm, reset=True)
    return rows


def make_table(rows: list[Row]) -> Table:
    """One row for each request; times in milliseconds."""
    table = Table(title="Prompt tokens by where they came from")
    for heading in ("phase", "turn", "prompt", "computed", "GPU cache", "CPU tier", "disk tier"):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    table.add_column("TTFT ms", justify="right")
    table.add_column("TTFT ms,\nall computed", justify="right", no_wrap=True)
    table.add_column("tokens\nequal", no_wrap=True)
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous and previous.phase != row.phase:
            table.add_section()
        table.add_row(
            row.phase,
            str(row.turn),
            str(row.prompt_tokens),
            *(str(tokens) for tokens in dataclasses.astuple(row.sources)),
            f"{row.ttft_s * 1000:.0f}",
            f"{row.ttft_computed_s * 1000:.0f}",
            "yes" if row.tokens_equal else "[red]NO[/red]",
        )
    return table


def verdict(rows: list[Row]) -> list[str]:
    """What went wrong; empty if nothing did."""
    problems = [
        f"{row.phase}, turn {row.turn}: other tokens than plain vLLM"
        for row in rows
        if not row.tokens_equal
    ]
    if not sum(row.sources.cpu for row in rows):
        problems.append("nothing was restored from the CPU tier")
    if not sum(row.sources.disk for row in rows if row.phase == "restarted"):
        problems.append("nothing was restored from the disk tier after the restart")
    return problems


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # so that servers are ended on the way out
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    model = make_llama(FOLDER / "model")
    try:
        log.print("starting plain vLLM for the reference (30 to 60 s)")
        reference = run_reference(model)
        log.print("starting vLLM with offloading (30 to 60 s)")
        rows = run_offloaded(model, reference)
    except ServerError as error:
        log.print(str(error), markup=False, highlight=False)
        return 1
    problems = verdict(rows)
    if arguments.json:
        requests = [dataclasses.asdict(row) for row in rows]
        print(json.dumps({"requests": requests, "problems": problems}, indent=2))
    else:
        Console(width=max(110, Console().width)).print(make_table(rows))
        for problem in problems:
            print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

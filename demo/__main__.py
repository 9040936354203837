"""``./run demo``: a conversation with a real vLLM server whose KV cache has a CPU and a disk tier.

1. Plain vLLM answers the conversation. This is the reference for the tokens, and for the time to
   compute every prompt in full.
2. vLLM with this project's connector answers the same conversation. Before every request, vLLM's
   own prefix cache is emptied, so that the prompts are restored from the CPU tier.
3. The server is stopped and started again: the prompts are restored from the disk.

The greedy tokens after a restored prompt are compared with those of plain vLLM whose own prefix
cache held the same tokens, and every restored block is compared with the computed one. Exit code 0
means that all were equal, and that tokens were restored from both the CPU tier and the disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from demo.mooncake import MasterError, why_not
from demo.server import ROOT, ServerError, VllmServer
from demo.shared import run_shared
from demo.sources import Compared, read_compared, wait_until_on_disk
from demo.talk import (
    COLUMNS_MIN,
    FLAGS,
    PATIENT,
    Reference,
    Row,
    answers_shown,
    ask_all,
    make_table,
    problems_of,
    run_reference,
    warm_up,
)
from demo.tiny_model import make_llama

FOLDER = ROOT / ".demo"

log = Console(stderr=True)


def connector_config(folder: Path) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of the demo: a CPU tier above LMDB in ``folder``."""
    return {
        "kv_connector": "KvTiersConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "512MiB", "policy": "lru"},
            "tiers": [{"type": "lmdb", "path": str(folder), "capacity": "1GiB", "policy": "lru"}],
            "verify": "device",  # compares every loaded block with the computed one
            "verify_path": str(folder.with_name("digests")),
        }
        | PATIENT,
    }


def run_offloaded(model: Path, reference: Reference) -> tuple[list[Row], Compared]:
    """Run the conversation with offloading, before and after a restart. Returns the rows and the
    result of the comparison."""
    connector = connector_config(FOLDER / "kv")
    server_log = FOLDER / "offload.log"
    with VllmServer(model, log=server_log, flags=FLAGS, connector=connector) as server:
        warm_up(server, reference.requests)
        rows = ask_all(server, "conversation", reference, reference.talk, reset=False)
        wait_until_on_disk(server)
        rows += ask_all(server, "cache emptied", reference, reference.warm, reset=True)
        wait_until_on_disk(server)
        compared = read_compared(server)
    log.print("starting vLLM with offloading again (30 to 60 s)")
    with VllmServer(model, log=server_log, flags=FLAGS, connector=connector) as server:
        warm_up(server, reference.requests)
        rows += ask_all(server, "restarted", reference, reference.warm, reset=True)
        compared += read_compared(server)
    return rows, compared


def verdict(rows: list[Row], compared: Compared) -> list[str]:
    """The problems that were found."""
    problems = problems_of(rows, compared)
    if not sum(row.sources.cpu for row in rows):
        problems.append("nothing was restored from the CPU tier")
    if not sum(row.sources.disk for row in rows if row.phase == "restarted"):
        problems.append("nothing was restored from the disk tier after the restart")
    return problems


def conclusion(rows: list[Row], compared: Compared) -> str:
    """One sentence about the result."""
    cpu = sum(row.sources.cpu for row in rows)
    disk = sum(row.sources.disk for row in rows if row.phase == "restarted")
    return (
        f"Result: {cpu:,} prompt tokens came back from the CPU tier and, after a restart, {disk:,} "
        f"from the disk tier; {answers_shown(rows)}, and all {compared.equal:,} restored blocks "
        "have the bytes that were computed."
    )


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--shared", action="store_true", help="two servers over a Mooncake store")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.shared and (missing := why_not()):
        log.print(missing, markup=False, highlight=False)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stops the servers when the demo ends
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    model = make_llama(FOLDER / "model")
    try:
        log.print("starting plain vLLM for the reference (30 to 60 s)")
        reference = run_reference(model, FOLDER / "plain.log")
        if arguments.shared:
            log.print("starting a Mooncake master and two servers (60 to 120 s)")
            rows, problems, shown = run_shared(model, FOLDER, reference)
        else:
            log.print("starting vLLM with offloading (30 to 60 s)")
            rows, compared = run_offloaded(model, reference)
            problems = verdict(rows, compared)
            shown = conclusion(rows, compared)
    except (ServerError, MasterError) as error:
        log.print(str(error), markup=False, highlight=False)
        return 1
    if arguments.json:
        requests = [dataclasses.asdict(row) for row in rows]
        print(json.dumps({"requests": requests, "problems": problems}, indent=2))
    else:
        lower = "store" if arguments.shared else "disk tier"
        restored = ("cache emptied", "restarted", "second server")
        Console(width=max(COLUMNS_MIN, Console().width)).print(make_table(rows, restored, lower))
        for problem in problems:
            print(f"FAILED: {problem}")
        if not problems:
            print(shown)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

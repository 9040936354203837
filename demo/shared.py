"""``./run demo --shared``: two real vLLM servers that share a Mooncake store.

1. Plain vLLM answers a conversation: the reference for the tokens and the times.
2. The first server with this project's connector computes it and stores it.
3. The second server, which has never seen it, restores it from the store.
4. The store's master is killed: both answer all the same. It is started again, empty, and is used
   again.

Exit code 0: all tokens equal, and the second server restored what the first had computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from demo.mooncake import Master
from demo.server import VllmServer
from demo.sources import STORED, wait_until_on_disk
from demo.talk import FLAGS, Reference, Row, ask_all, warm_up

BACK_S = 90.0
HASH = "--prefix-caching-hash-algo=sha256_cbor"
"""Equal in every process; vLLM's own choice may differ for equal content, which costs hits."""


def connector_config(master: Master) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of both servers: a CPU tier above the store."""
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "64MiB", "policy": "lru"},
            "tiers": [master.tier()],
            "lookup_timeout_s": 1.0,
            "break_even": False,  # this model computes faster than anything loads
        },
    }


def run_shared(model: Path, folder: Path, reference: Reference) -> tuple[list[Row], list[str], str]:
    """The conversation on two servers, what went wrong, and one sentence on what was shown."""
    rows: list[Row] = []
    with Master(folder / "master.log") as master:
        connector = connector_config(master)

        def server(number: int) -> VllmServer:
            log = folder / f"server-{number}.log"
            return VllmServer(model, log=log, flags=[*FLAGS, HASH], connector=connector)

        with server(1) as one, server(2) as two:
            for each in (one, two):
                warm_up(each, reference.requests)
            rows += ask_all(one, "first server", reference, reference.talk, False, "mooncake")
            wait_until_on_disk(one, "mooncake")
            rows += ask_all(two, "second server", reference, reference.warm, True, "mooncake")
            master.kill()
            rows += ask_all(two, "master killed", reference, reference.warm, True, "mooncake")
            master.start()
            problems = [] if _is_used_again(one) else ["the new master's store was not used"]
    return rows, problems + verdict(rows), conclusion(rows)


def conclusion(rows: list[Row]) -> str:
    """One sentence that says what was shown."""
    found = sum(row.sources.disk for row in rows if row.phase == "second server")
    return (
        f"Shown: a second server restored {found:,} prompt tokens that only the first had "
        "computed, both answered while the store's master was dead, and every answer has the "
        "tokens of vLLM without offloading."
    )


def _is_used_again(server: VllmServer) -> bool:
    """New prompts until the tier's breakers have closed and it is written again."""
    end = time.monotonic() + BACK_S
    before = _stored(server)
    number = 0
    while _stored(server) == before:
        number += 1
        server.chat([{"role": "user", "content": f"Number {number}. " + "Tell me more. " * 40}], 1)
        if time.monotonic() > end:
            return False
    return True


def _stored(server: VllmServer) -> float:
    return server.metrics().get(f'{STORED}{{tier="mooncake"}}', 0.0)


def verdict(rows: list[Row]) -> list[str]:
    """The problems found; empty if there are none."""
    problems = [
        f"{row.phase}, turn {row.turn}: other tokens than plain vLLM"
        for row in rows
        if not row.tokens_equal
    ]
    if not sum(row.sources.disk for row in rows if row.phase == "second server"):
        problems.append("the second server restored nothing that the first had computed")
    return problems

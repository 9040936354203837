"""``./run demo --shared``: two real vLLM servers that share a Mooncake store.

1. Plain vLLM answers a conversation. This is the reference for the tokens and the times.
2. The first server with this project's connector computes and stores the conversation.
3. The second server, which has never seen it, restores it from the store.
4. The store's master is killed: both servers still answer. It is started again, empty, and the
   servers use it again.

Exit code 0 means that all tokens and restored blocks were equal, and that the second server
restored blocks that the first had computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from demo.mooncake import Master
from demo.server import DEADLINE_S, VllmServer
from demo.sources import STORED, Compared, read_compared, wait_until_on_disk
from demo.talk import (
    FLAGS,
    PATIENT,
    Reference,
    Row,
    answers_shown,
    ask_all,
    problems_of,
    warm_up,
)

HASH = "--prefix-caching-hash-algo=sha256_cbor"
"""This hash algorithm gives the same hashes in every process. vLLM's default may not, which would
cost hits."""


def connector_config(master: Master, folder: Path) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of both servers: a CPU tier above the store. Through ``folder``,
    each server finds the digests of the chunks that the other one has computed, for ``verify``."""
    return {
        "kv_connector": "KvTiersConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "64MiB", "policy": "lru"},
            "tiers": [master.tier()],
            "verify": "device",  # compares every loaded block with the computed one
            "verify_path": str(folder / "digests"),
        }
        | PATIENT,
    }


def run_shared(model: Path, folder: Path, reference: Reference) -> tuple[list[Row], list[str], str]:
    """Run the conversation on two servers. Returns the rows, the problems, and one sentence about
    the result."""
    rows: list[Row] = []
    with Master(folder / "master.log") as master:
        connector = connector_config(master, folder)

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
            compared = read_compared(one) + read_compared(two)
    return rows, problems + verdict(rows, compared), conclusion(rows, compared)


def conclusion(rows: list[Row], compared: Compared) -> str:
    """One sentence about the result."""
    found = sum(row.sources.disk for row in rows if row.phase == "second server")
    return (
        f"Result: a second server restored {found:,} prompt tokens that only the first had "
        f"computed, and answered while the store's master was dead; {answers_shown(rows)}, and all "
        f"{compared.equal:,} restored blocks have the bytes that were computed."
    )


def _is_used_again(server: VllmServer) -> bool:
    """Send new prompts until the tier's circuit breakers have closed and chunks are written to it
    again."""
    end = time.monotonic() + DEADLINE_S
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


def verdict(rows: list[Row], compared: Compared) -> list[str]:
    """The problems that were found."""
    problems = problems_of(rows, compared)
    if not sum(row.sources.disk for row in rows if row.phase == "second server"):
        problems.append("the second server restored nothing that the first had computed")
    return problems

"""A custom eviction policy: judged in the simulator, then at work in a real vLLM server.

Run from a checkout with vLLM: ``python examples/custom_policy.py``. It simulates the policy, starts
a server with a tiny model whose CPU and LMDB tiers both use it, holds several conversations, and
shows what came back from which tier. Takes about a minute on a CPU.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.server import VllmServer
from demo.sources import read_compared, read_sources, wait_until_on_disk
from demo.talk import PATIENT
from demo.tiny_model import make_llama
from policies import EntryInfo, EvictionPolicy, Key, RemoveCause, bound, make_policy, simulate
from policies.testing import synthetic_trace

logger = logging.getLogger("offload.example")


class HeadsLastPolicy(EvictionPolicy):
    """LRU that evicts the first ``head_tokens`` tokens of prompts last: system prompts stay."""

    def __init__(self, head_tokens: int = 64) -> None:
        self._head_tokens = head_tokens
        self._heads: OrderedDict[Key, None] = OrderedDict()
        self._rest: OrderedDict[Key, None] = OrderedDict()
        self._named = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        queue = self._heads if 0 < info.depth_tokens <= self._head_tokens else self._rest
        queue[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            for queue in (self._heads, self._rest):
                if key in queue:
                    queue.move_to_end(key)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        in_order = filter(evictable, chain(self._rest, self._heads))
        found = list(islice(in_order, count))
        if found and not self._named:
            logger.warning("HeadsLastPolicy names its first victims")
        self._named += len(found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        self._heads.pop(key, None)
        self._rest.pop(key, None)

    def clear(self) -> None:
        self._heads.clear()
        self._rest.clear()

    def __len__(self) -> int:
        return len(self._heads) + len(self._rest)


def in_the_simulator() -> None:
    """Compare it with LRU and with Belady's optimum."""
    trace = synthetic_trace(1, requests=1000)
    capacity = trace.unique_blocks() // 20
    for result in (
        bound(trace, capacity),
        simulate(trace, make_policy("lru"), capacity),
        simulate(trace, HeadsLastPolicy(), capacity),
    ):
        print(f"simulated {result.policy}: {result.token_hit_ratio:.1%} of the prompt tokens hit")


def in_a_server(folder: Path) -> bool:
    """Serve with it; return True if it chose victims, and prompts came back from the disk with the
    bytes that were computed."""
    policy = {"name": "examples.custom_policy:HeadsLastPolicy", "head_tokens": 64}
    connector = {
        "kv_connector": "KvTiersConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu": {"capacity": "4MiB", "policy": policy},
            "tiers": [
                {
                    "type": "lmdb",
                    "path": str(folder / "kv"),
                    "capacity": "9MiB",
                    "policy": policy,
                }
            ],
            "verify": "device",  # compares every loaded block with what was computed
        }
        | PATIENT,  # a busy machine loses no block
    }
    flags = (
        "--enforce-eager",
        "--max-model-len=4096",
        "--block-size=32",
        "--kv-cache-memory-bytes=67108864",
    )
    model = make_llama(folder / "model")
    restored = {"cpu": 0, "disk": 0}
    log = folder / "server.log"
    with VllmServer(model, log=log, flags=flags, connector=connector) as server:
        server.nudge()
        for turn in range(2):
            for user in range(4):
                question = f"User {user} asks for the same long story again. " * 40
                server.reset_prefix_cache()
                before = server.metrics()
                answer = server.chat([{"role": "user", "content": question}], 8)
                sources = read_sources(server, before, answer.prompt_tokens)
                print(f"served turn {turn}, user {user}: {sources}")
                restored["cpu"] += sources.cpu
                restored["disk"] += sources.disk
                wait_until_on_disk(server)
        compared = read_compared(server)
    used = "HeadsLastPolicy names its first victims" in log.read_text(errors="replace")
    print(f"restored tokens: {restored}; the policy chose victims in the server: {used}")
    print(f"restored blocks: {compared}")
    all_right = compared.equal > 0 == compared.different == compared.unknown
    return used and all_right and restored["disk"] > 0


def main() -> int:
    """Simulate, then serve; returns the exit code."""
    in_the_simulator()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if in_a_server(Path(folder)) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A custom eviction policy, first evaluated in the simulator and then used in a real vLLM server.

Run from a checkout with vLLM: ``python examples/custom_policy.py``. It simulates the policy, starts
a server with a tiny model whose CPU and LMDB tiers both use it, holds several conversations, and
shows how many tokens were restored from which tier. This takes about a minute on a CPU.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.server import VllmServer
from demo.sources import read_compared, read_sources, wait_until_on_disk
from demo.talk import PATIENT
from demo.tiny_model import make_llama
from policies import EntryInfo, EvictionPolicy, Key, RemoveCause, bound, make_policy, simulate
from policies.testing import synthetic_trace

logger = logging.getLogger("offload.example")


class EndedFirstPolicy(EvictionPolicy):
    """LRU that evicts conversations first once their clients say that they are over.

    Shared chunks are kept: a chunk that was followed by two different chunks is a fork, and only
    chunks after the last fork belong to a single conversation.
    """

    def __init__(self) -> None:
        # oldest use first, as in the next attribute
        self._over: OrderedDict[Key, None] = OrderedDict()
        self._live: OrderedDict[Key, None] = OrderedDict()
        self._next: dict[Key, Key] = {}
        self._forks: set[Key] = set()
        self._named = 0

    def insert(self, key: Key, info: EntryInfo) -> None:
        self._live[key] = None

    def touch(self, keys: Sequence[Key]) -> None:
        members = [key for key in keys if key in self._live or key in self._over]
        for key, follower in pairwise(members):
            if self._next.setdefault(key, follower) != follower:
                self._forks.add(key)
        for key in reversed(members):
            self._over.pop(key, None)
            self._live[key] = None
            self._live.move_to_end(key)

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        if hints.get("session_end"):
            shared = [index for index, key in enumerate(keys) if key in self._forks]
            for key in reversed(keys[max(shared, default=-1) + 1 :]):
                if key in self._live:
                    del self._live[key]
                    self._over[key] = None

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        in_order = filter(evictable, chain(self._over, self._live))
        found = list(islice(in_order, count))
        if found and not self._named:
            logger.warning("EndedFirstPolicy names its first victims")
        self._named += len(found)
        return found

    def remove(self, key: Key, cause: RemoveCause) -> None:
        for queue in (self._over, self._live, self._next):
            queue.pop(key, None)
        self._forks.discard(key)

    def clear(self) -> None:
        for queue in (self._over, self._live, self._next, self._forks):
            queue.clear()

    def __len__(self) -> int:
        return len(self._over) + len(self._live)


def in_the_simulator() -> None:
    """Compare the policy with LRU, the default policy and Belady's optimum, on a trace of
    conversations whose clients announce their end. A twentieth of the trace fits."""
    trace = synthetic_trace(1, requests=1000)
    capacity = trace.unique_blocks() // 20
    for result in (
        bound(trace, capacity),
        simulate(trace, make_policy("lru"), capacity),
        simulate(trace, make_policy("adaptive"), capacity, hints="end"),
        simulate(trace, EndedFirstPolicy(), capacity, hints="end"),
    ):
        print(f"simulated {result.policy}: {result.token_hit_ratio:.1%} of the prompt tokens hit")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[VllmServer]:
    """Create a server whose CPU tier and LMDB tier both use the policy. Its log is
    ``server.log``."""
    policy = "examples.custom_policy:EndedFirstPolicy"
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
            "verify": "device",  # compares every loaded block with the computed one
        }
        | PATIENT,  # no store is skipped on a busy machine
    }
    flags = (
        "--enforce-eager",
        "--max-model-len=4096",
        "--block-size=32",
        "--kv-cache-memory-bytes=67108864",
        *flags,
    )
    model = make_llama(folder / "model")
    log = folder / "server.log"
    with VllmServer(model, log=log, flags=flags, connector=connector) as started:
        started.nudge()
        yield started


def converse(server: VllmServer, turn: int) -> Counter[str]:
    """Let four users ask questions, each time with vLLM's own cache emptied. Returns the restored
    tokens by tier."""
    restored: Counter[str] = Counter()
    for user in range(4):
        question = f"User {user} asks for the same long story again. " * 40
        server.reset_prefix_cache()
        before = server.metrics()
        answer = server.chat([{"role": "user", "content": question}], 8)
        sources = read_sources(server, before, answer.prompt_tokens)
        print(f"served turn {turn}, user {user}: {sources}")
        restored.update(cpu=sources.cpu, disk=sources.disk)
        wait_until_on_disk(server)
    return restored


def in_a_server(server: VllmServer) -> bool:
    """Serve with the policy. Returns True if it chose victims, and prompts were restored from the
    disk with the computed bytes."""
    restored = converse(server, 0) + converse(server, 1)
    compared = read_compared(server)
    log = server.log_path.read_text(errors="replace")
    used = "EndedFirstPolicy names its first victims" in log
    print(f"restored tokens: {dict(restored)}; the policy chose victims in the server: {used}")
    print(f"restored blocks: {compared}")
    all_right = compared.equal > 0 == compared.different == compared.unknown
    return used and all_right and restored["disk"] > 0


def main() -> int:
    """Simulate, then serve; returns the exit code."""
    in_the_simulator()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        return 0 if in_a_server(server) else 1


if __name__ == "__main__":
    raise SystemExit(main())

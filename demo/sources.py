"""Reads from vLLM's metrics where the prompt tokens of a request came from."""

from __future__ import annotations

import time
from dataclasses import dataclass

from demo.server import DEADLINE_S, Metrics, ServerError, VllmServer

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
LOADED = "vllm:kvtiers_loaded_tokens_total"
STORED = "vllm:kvtiers_stored_chunks_total"


@dataclass(frozen=True, slots=True)
class Sources:
    """Numbers of prompt tokens by source. ``gpu`` is vLLM's own prefix cache."""

    computed: int
    gpu: int
    cpu: int
    disk: int


def read_sources(
    server: VllmServer, before: Metrics, prompt_tokens: int, lower: str = "lmdb"
) -> Sources:
    """The increase of the metrics by one request with ``prompt_tokens`` tokens.

    Metrics are published shortly after the answer, so this waits until every token of the prompt is
    accounted for. Raises ``ServerError`` if that does not happen.
    """
    end = time.monotonic() + DEADLINE_S
    nudges = 0
    while True:
        now = server.metrics()

        def grown(name: str, label: str, now: Metrics = now) -> int:
            series = f"{name}{{{label}}}"
            return round(now.get(series, 0) - before.get(series, 0))

        computed = grown(BY_SOURCE, 'source="local_compute"')
        gpu = grown(BY_SOURCE, 'source="local_cache_hit"')
        external = grown(BY_SOURCE, 'source="external_kv_transfer"')
        cpu, disk = grown(LOADED, 'tier="cpu"'), grown(LOADED, f'tier="{lower}"')
        # minus the nudges, which have one token each
        own = computed + gpu + external - prompt_tokens
        if 0 <= own <= nudges and cpu + disk >= external:
            return Sources(computed - own, gpu, cpu, disk)
        if time.monotonic() > end:
            raise ServerError(
                f"a prompt of {prompt_tokens} tokens, but the metrics name {computed} computed, "
                f"{gpu} from the GPU cache, {external} from outside (CPU {cpu}, disk {disk})"
            )
        server.nudge()
        nudges += 1


def load_failures(metrics: Metrics) -> float:
    """The number of failed loads, after which the prompts were recomputed."""
    return metrics.get("vllm:kvtiers_load_failures_total", 0.0)


@dataclass(frozen=True, slots=True)
class Compared:
    """The numbers of restored chunks (one block each here) by the result of ``verify``: equal to
    the computed chunk, different, or not comparable."""

    equal: int
    different: int
    unknown: int

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.equal + other.equal,
            self.different + other.different,
            self.unknown + other.unknown,
        )


def read_compared(server: VllmServer) -> Compared:
    """The numbers of chunks that a server has compared since its start."""
    server.nudge()
    metrics = server.metrics()
    names = ("verified", "differing", "unverified")
    return Compared(*(int(metrics.get(f"vllm:kvtiers_{name}_chunks_total", 0)) for name in names))


def wait_until_on_disk(server: VllmServer, lower: str = "lmdb") -> None:
    """Wait until every chunk in the CPU tier has reached the disk tier, too."""
    end = time.monotonic() + DEADLINE_S
    while True:
        now = server.metrics()
        cpu, disk = (now.get(f'{STORED}{{tier="{tier}"}}', 0) for tier in ("cpu", lower))
        if 0 < cpu <= disk:
            return
        if time.monotonic() > end:
            raise ServerError(f"{cpu} chunks reached the CPU tier, but only {disk} the tier below")
        server.nudge()

"""Predicts the results of ``bench backlog`` by the simulator, from the speeds of its engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.backlog_worlds import Config
from bench.scenario import median
from bench.serve_engine import Batch
from bench.serve_systems import BLOCK_TOKENS, MODELS
from policies.registry import make_policy
from policies.simulation.simulator import FlopModel, Infos, SimTier
from policies.simulation.timing import Speeds, simulate_timed
from policies.simulation.trace import Request, Trace


def measured_speeds(config: Config, plain: Sequence[Batch]) -> Speeds:
    """The engine's speeds for the simulator, from the batches with nothing stored. The prompts that
    run at a time are computed together and then answered together, again and again."""
    turns = math.ceil(config.prompts / config.in_flight)
    first = median([sorted(batch.ttft_s)[config.in_flight - 1] for batch in plain])
    answer = median([batch.seconds for batch in plain]) / turns - first
    token_bytes = MODELS[config.model].kv_bytes_per_token
    return Speeds(
        prefill=config.in_flight * config.size / first,
        decode=max(1, config.output_tokens - 1) / max(answer, 1e-6),
        read=config.disk_mb_s * 1e6 / token_bytes,
        in_flight=config.in_flight,
    )


def predict(
    config: Config, speeds: Speeds, cpu_share: float, look_ahead: float
) -> Mapping[str, float]:
    """Simulate one world: a CPU tier that holds the share ``cpu_share`` of all prompts, over a disk
    that holds them all. All of them are in the CPU tier if it has the space."""
    chunks = config.restorable // BLOCK_TOKENS
    requests = [
        Request(0.0, config.size, ((chunks * number, chunks),), config.output_tokens)
        for number in range(config.prompts)
    ]
    everything = config.prompts * chunks
    upper = SimTier(make_policy("lru"), max(1, int(cpu_share * everything)))
    lower = SimTier(make_policy("lru"), 2 * everything)
    infos = Infos(BLOCK_TOKENS, FlopModel())
    for request in requests:
        stored = [infos.plain(depth) for depth in range(chunks)]
        lower.insert(request.blocks(), stored)
        if cpu_share >= 1:
            upper.insert(request.blocks(), stored)
    trace = Trace("backlog", BLOCK_TOKENS, requests)
    return simulate_timed(trace, upper, lower, speeds, look_ahead=look_ahead).extra

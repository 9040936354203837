"""The worlds of ``bench backlog``: engines over a fast or a slow store, all with the same
prompts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve_engine import Engine
from bench.serve_systems import BLOCK_TOKENS, MODELS, SYSTEMS, Start, TierSizes, kvtiers
from bench.slow_engines import engine_arguments, forced
from demo.tiny_model import make_llama

PLAIN = "nothing stored"
HOST = "all in the CPU tier"
DISK = "all on disk"
AHEAD = "all on disk, look-ahead"
DEFAULTS = "all on disk, default options"
WAITS = "all on disk, default options, waits"
RIVAL = SYSTEMS["lmcache-server"].name
WORLDS = (PLAIN, HOST, DISK, AHEAD, DEFAULTS, WAITS)
"""If LMCache is installed, ``RIVAL`` is also compared: its server, with all in its memory."""
ON_DISK = (DISK, AHEAD, DEFAULTS, WAITS)
FORCED = (HOST, DISK, AHEAD)
"""Worlds that load everything that is stored; the others may compute it where that is faster."""


@dataclass(frozen=True, slots=True)
class Config:
    """``prompts`` of ``size`` tokens queue; ``in_flight`` of them run at a time, for which the GPU
    has blocks. In the worlds with a disk the CPU tier holds the share ``cpu_share`` of them, and
    ``look_ahead`` of that may be read ahead. ``disk_mb_s`` (MB/s) bounds the disk's reads; 0 does
    not bound them. No round begins later than ``minutes`` after the start of the first one.
    By default each engine leaves one processor free, because a GPU computes without the processors
    that read and copy.

    All prompts of a batch are sent at once, or ``queue`` of them at a time if it is not 0. With a
    queue of at most ``in_flight`` no request waits for another one.
    """

    prompts: int = 12
    size: int = 768
    in_flight: int = 2
    output_tokens: int = 64
    rounds: int = 8
    minutes: float = 60.0
    disk_mb_s: float = 40.0
    cpu_share: float = 0.5
    look_ahead: float = 0.5
    model: str = "small"
    threads: int = max(1, (os.cpu_count() or 1) - 1)
    folder: str = ""
    queue: int = 0

    @property
    def prompt_bytes(self) -> int:
        """The bytes of one prompt's KV cache, in whole blocks."""
        return self.restorable * MODELS[self.model].kv_bytes_per_token

    @property
    def restorable(self) -> int:
        """The tokens of a prompt that can be restored: whole blocks."""
        return self.size // BLOCK_TOKENS * BLOCK_TOKENS


@contextlib.contextmanager
def engines_of(config: Config, root: Path) -> Iterator[dict[str, Engine]]:
    """Yields the engines by world, once all have started."""
    model = make_llama(root / "model", shape=MODELS[config.model].shape)
    everything = config.prompts * config.prompt_bytes
    host, small = everything + (64 << 20), max(1 << 20, int(config.cpu_share * everything))
    with contextlib.ExitStack() as stack:
        engines = {}
        for number, world in enumerate(worlds()):
            folder = root / f"disk{number}"
            folder.mkdir(mode=0o700)
            sizes = TierSizes(host, small, 2 * everything + (256 << 20), folder)
            start = _start(world, config, sizes)
            longest = config.size + config.output_tokens
            arguments = engine_arguments(config.model, model, longest, config.in_flight)
            arguments["kv_transfer_config"] = start.connector
            threads = {"OMP_NUM_THREADS": str(config.threads)}
            engine = Engine(arguments, threads | start.env, root / f"engine{number}.log")
            stack.callback(engine.close)
            engines[world] = engine
        for engine in engines.values():
            engine.wait()
        yield engines


def worlds() -> tuple[str, ...]:
    """The worlds that this machine can run."""
    return WORLDS if SYSTEMS["lmcache-server"].missing else (*WORLDS, RIVAL)


def _start(world: str, config: Config, sizes: TierSizes) -> Start:
    """The connector of a world."""
    if world == PLAIN:
        return Start()
    if world == RIVAL:
        return SYSTEMS["lmcache-server"].start(sizes)
    on_disk = world in ON_DISK
    disk = {"type": "lmdb", "path": str(sizes.folder), "capacity": sizes.disk, "reserve": 0}
    extra: dict[str, Any] = {
        "cpu": {"capacity": sizes.small if on_disk else sizes.host},
        "tiers": [disk] if on_disk else [],
    }
    if world in FORCED:
        extra |= forced(config.look_ahead if world == AHEAD else 0.0)
    if world == WAITS:
        extra["wait_for_reads"] = "auto"
    return kvtiers(extra)

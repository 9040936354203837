"""Hundreds of rounds of load over a disk that fails again and again: loaded chunks are what was
computed, and memory, threads and open files do not grow.

``KVTIERS_SOAK_TURNS=4000 KVTIERS_SEED=7 python -m pytest tests/vllm/test_soak.py`` runs longer.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.vllm import faults, sick_disk
from tests.vllm.engine import Engine
from tests.vllm.probes import check, is_idle, totals
from tests.vllm.restored import HASH, config, prompts, see_planted_faults

TURNS = int(os.environ.get("KVTIERS_SOAK_TURNS", "256"))
SEED = int(os.environ.get("KVTIERS_SEED", "5"))
TURNS_PER_SAMPLE = 8
TOKENS_PER_S = 1.0
"""The assumed speed of computing on every machine: only a disk that hangs is slower."""
LONG, SHORT = (PATIENCE_S, PATIENCE_S), (1.0, 0.2)
"""Limits in seconds for a load and a disk operation: with a healthy disk, and with a failing
one."""
STATES = ("hangs", "fails", "is full", "crawls")
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4"}
"""oneDNN keeps memory for every new matrix size: even without a connector, an engine grows by 10
MiB a minute under this load."""
SEEDS = 100
"""Number of new prompts. They are repeated, so that the table of their digests stops growing."""
GROWTH_MAX_BYTES = 24 << 20
"""Allowed growth between the medians of the second and the last quarter; the CPU tier holds 1
MiB."""


def resident_bytes(worker: Any) -> int:
    """Memory of the worker's process."""
    import gc

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """One engine under random load. ``samples`` are bytes, open files and threads at rest."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known = prompts(6)
        self.random = random.Random(SEED)
        self.samples: list[tuple[int, int, int]] = []
        self.turns = 0
        self.owes_reset = False
        """True if a failing disk could not record a reset in time (vLLM then returns False)."""

    def turn(self) -> None:
        """Send a few requests, known and new ones; from time to time something goes wrong."""
        self.turns += 1
        what = self.random.random()
        if what < 0.15:
            self.infect(self.random.choice(STATES))
        elif what < 0.40:
            self.infect("well")
        elif what < 0.50:
            self.abort_some()
        elif what < 0.55:
            self.owes_reset |= not self.engine.try_to_reset(connector=True)
        elif what < 0.75:
            self.engine.reset_prefix_cache()
        seed = self.random.randrange(SEEDS)
        new = prompts(2, tokens=40 + 5 * seed, seed=seed)
        self.engine.generate([*self.random.sample(self.known, 2), *new])
        self.engine.call(check)

    def infect(self, state: str) -> None:
        limits = LONG if state == "well" else SHORT
        self.engine.call(faults.on_workers, sick_disk.set_limits, *limits)
        self.engine.call(faults.on_workers, sick_disk.infect, state)

    def abort_some(self) -> None:
        """Abort requests while they compute or load."""
        names = [f"gone-{self.turns}-{number}" for number in range(3)]
        for number, name in enumerate(names):
            self.engine.submit(name, self.known[number], max_tokens=30)
        self.engine.step(self.random.randrange(1, 6))
        self.engine.abort(*names)

    def sample(self) -> None:
        """Measure at rest, with a healthy disk."""
        self.infect("well")
        if self.owes_reset:
            self.engine.reset_prefix_cache(connector=True)
            self.owes_reset = False
        self.engine.step_until(is_idle)
        files, threads = self.engine.call(faults.on_workers, faults.open_files)[0]
        memory = self.engine.call(faults.on_workers, resident_bytes)[0]
        self.samples.append((memory, files, threads))


@pytest.mark.thorough
@pytest.mark.timeout(900 + 10 * TURNS)
def test_load_with_faults_leaks_nothing(llama: Path, tmp_path: Path) -> None:
    offload = config(tmp_path / "kv", cpu="1MiB", break_even=True)
    options = HASH | {"connector": offload, "env": FEW_PRIMITIVES}
    with Engine(llama, log=tmp_path / "log", **options) as engine:
        engine.call(sick_disk.retry_soon)
        engine.call(sick_disk.compute_at, TOKENS_PER_S)
        soak = Soak(engine)
        while soak.turns < TURNS:
            soak.turn()
            if soak.turns % TURNS_PER_SAMPLE == 0:
                soak.sample()
        found, checked = engine.call(totals), engine.verified()
        soak.infect("well")
        engine.generate_one(soak.known[0])
        see_planted_faults(engine, lambda: engine.generate_one(soak.known[0]))
    print(f"seed {SEED}: {soak.turns} turns, {checked}, {found}")
    assert checked.equal > 0
    assert found["loaded_tokens:lmdb"] > 0
    assert found["breaker_openings:lmdb"] > 0, "the faults never occurred"
    quarter = len(soak.samples) // 4
    early, late = soak.samples[quarter : 2 * quarter], soak.samples[-quarter:]
    memory, files, threads = (
        statistics.median(row[column] for row in late)
        - statistics.median(row[column] for row in early)
        for column in range(3)
    )
    assert files <= 0, f"seed {SEED}: {files} more open files: {soak.samples}"
    assert threads <= 0, f"seed {SEED}: {threads} more threads: {soak.samples}"
    assert memory <= GROWTH_MAX_BYTES, f"seed {SEED}: {memory} more bytes: {soak.samples}"

"""Kills a server at random moments while it stores and loads, repeatedly on one folder.

``KVTIERS_KILLS=50 KVTIERS_SEED=9 python -m pytest tests/vllm/test_kills.py`` kills 50 times.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.copy_faults import hold_loads
from tests.vllm.engine import Engine
from tests.vllm.faults import hold_reads_and_writes, on_workers
from tests.vllm.probes import check, connector, totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import (
    HASH,
    Reference,
    all_were_compared,
    ask_twice,
    config,
    loaded_tokens,
    prompts,
    see_planted_faults,
    settle,
)

KILLS = int(os.environ.get("KVTIERS_KILLS", "3"))
SEED = int(os.environ.get("KVTIERS_SEED", "9"))
CAP_BYTES = 8 << 20
AWAITED = ({"load"}, {"store", "write-through"}, {"load", "store", "write-through"})
"""The kinds of jobs of which a kill must meet one, in turn."""
ATTEMPTS = 5
"""Number of rounds in which a kill waits for such a job before it brings one about."""
DIFFERS = "is not what was computed"
KNOWN_FILES = {"owner.lock", "data.mdb", "lock.mdb", "payload.data", "scrub", "scrub.new"}


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def strays(folder: Path) -> set[str]:
    """Unexpected files in a tier's folder."""
    inside = {path.name for path in folder.rglob("rank*/**/*") if path.is_file()}
    return inside - KNOWN_FILES


def kinds_in_flight(llm: Any) -> set[str]:
    """The kinds of jobs that the workers have not finished."""
    return {job.kind.value for job in connector(llm).serving.side.planner.jobs.jobs()}


def is_in_flight(llm: Any, kinds: Set[str]) -> bool:
    """True if a job of one of these kinds is under way."""
    return not kinds_in_flight(llm).isdisjoint(kinds)


def is_in_flight_or_over(llm: Any, kinds: Set[str]) -> bool:
    """True if a job of one of these kinds is under way, or nothing is left to do."""
    return is_in_flight(llm, kinds) or not (
        llm.llm_engine.has_unfinished_requests() or kinds_in_flight(llm)
    )


def kill_under_load(
    engine: Engine, reference: Reference, draw: random.Random, kinds: Set[str]
) -> set[str]:
    """Send known and new prompts, all in flight together, repeatedly. In the last round, kill the
    engine while a job of one of these kinds is under way. Return the kinds of all jobs that were
    under way at that moment."""
    for _ in range(draw.randrange(1, 3)):
        engine.reset_prefix_cache()
        engine.generate(known_and_new(reference, draw), max_tokens=4)
    for attempt in itertools.count():
        if attempt == ATTEMPTS:  # where steps are long, jobs end in the step that begins them
            engine.call(on_workers, hold_reads_and_writes)
            engine.call(on_workers, hold_loads)  # also those from the CPU tier
        engine.reset_prefix_cache()
        for number, prompt in enumerate(known_and_new(reference, draw)):
            engine.submit(f"{attempt}-{number}", prompt, max_tokens=4 + number % 3)
        engine.step(draw.randrange(4))
        engine.step_until(is_in_flight_or_over, kinds)
        met: set[str] = engine.call(kinds_in_flight)
        if not met.isdisjoint(kinds):
            break
        assert attempt < ATTEMPTS, "no job is in progress although the tiers do not answer"
    engine.kill()
    return met


def known_and_new(reference: Reference, draw: random.Random) -> list[Prompt]:
    new = prompts(4, tokens=draw.randrange(64, 600), seed=draw.randrange(10**9))
    return draw.sample(mixed := [*reference.prompts, *new], len(mixed))


@pytest.mark.timeout(300 + 120 * KILLS)
def test_killed_again_and_again(llama: Path, tmp_path: Path) -> None:
    reference = Reference.record(llama, tmp_path / "ref.log", prompts(2))
    draw = random.Random(SEED)
    shared_memory: set[Path] = set()
    met: set[str] = set()
    folder = tmp_path / "kv"
    tier = {"type": "lmdb", "path": str(folder), "capacity": CAP_BYTES, "reserve": 0}
    offload = config(None, cpu="1MiB", tiers=[tier])
    for cycle in range(KILLS + 1):
        where = f"cycle {cycle}, KVTIERS_SEED={SEED}"
        with Engine(llama, log=tmp_path / "log", connector=offload, **HASH) as engine:
            compared = ask_twice(engine, reference)
            assert cycle or compared > 0, where
            assert cycle == 0 or loaded_tokens(engine, "lmdb") > 0, f"{where}: nothing was found"
            found = engine.call(totals)
            assert found["load_failures"] == found["dropped_chunks:lmdb"] == 0, f"{where}: {found}"
            assert cycle == 0 or all_were_compared(engine), f"{where}: {engine.verified()}"
            settle(engine)
            engine.call(check)
            shared_memory |= engine.shared_memory()
            if cycle < KILLS:
                met |= kill_under_load(engine, reference, draw, AWAITED[cycle % len(AWAITED)])
            assert DIFFERS not in engine.whole_log(), where
            if cycle == KILLS:
                see_planted_faults(engine, lambda: engine.generate_one(reference.prompts[0]))
                assert DIFFERS in engine.whole_log()
        assert bytes_below(folder) <= CAP_BYTES, where
        assert not strays(folder), where
    assert not [path for path in shared_memory if path.exists()]
    assert "load" in met, "no kill interrupted a load"
    assert KILLS < 2 or met & {"store", "write-through"}, "no kill interrupted a store"

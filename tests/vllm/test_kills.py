"""Kills a server at random moments while it stores and loads, repeatedly on one folder.

``KVTIERS_KILLS=50 KVTIERS_SEED=9 python -m pytest tests/vllm/test_kills.py`` kills 50 times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from tests.vllm.engine import Engine, EngineError
from tests.vllm.probes import check, totals
from tests.vllm.restored import (
    HASH,
    Reference,
    all_were_compared,
    ask,
    config,
    loaded_tokens,
    prompts,
    settle,
)

KILLS = int(os.environ.get("KVTIERS_KILLS", "3"))
SEED = int(os.environ.get("KVTIERS_SEED", "9"))
CAP_BYTES = 8 << 20
KNOWN_FILES = {"owner.lock", "data.mdb", "lock.mdb", "payload.data", "scrub", "scrub.new"}


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def strays(folder: Path) -> set[str]:
    """Unexpected files in a tier's folder."""
    inside = {path.name for path in folder.rglob("rank*/**/*") if path.is_file()}
    return inside - KNOWN_FILES


def load_until_killed(engine: Engine, reference: Reference, draw: random.Random) -> None:
    """Known and new prompts in flight, until SIGKILL arrives."""
    timer = threading.Timer(draw.uniform(0.05, 1.5), os.kill, (engine.pid, signal.SIGKILL))
    timer.start()
    with contextlib.suppress(EngineError):
        for turn in range(100):
            new = prompts(4, tokens=draw.randrange(64, 600), seed=draw.randrange(10**9))
            engine.generate([*reference.prompts, *new], max_tokens=4 + turn % 3)
            engine.reset_prefix_cache()
    timer.join()
    engine.kill()


@pytest.mark.timeout(300 + 120 * KILLS)
def test_killed_again_and_again(llama: Path, tmp_path: Path) -> None:
    reference = Reference.record(llama, tmp_path / "ref.log", prompts(2))
    draw = random.Random(SEED)
    shared_memory: set[Path] = set()
    folder = tmp_path / "kv"
    tier = {"type": "lmdb", "path": str(folder), "capacity": CAP_BYTES, "reserve": 0}
    offload = config(None, cpu="1MiB", tiers=[tier])
    for cycle in range(KILLS + 1):
        where = f"cycle {cycle}, KVTIERS_SEED={SEED}"
        with Engine(llama, log=tmp_path / "log", connector=offload, **HASH) as engine:
            assert ask(engine, reference) > 0, where
            assert cycle == 0 or loaded_tokens(engine, "lmdb") > 0, f"{where}: nothing was found"
            found = engine.call(totals)
            assert found["load_failures"] == found["dropped_chunks:lmdb"] == 0, f"{where}: {found}"
            assert cycle == 0 or all_were_compared(engine), f"{where}: {engine.verified()}"
            settle(engine)
            engine.call(check)
            shared_memory |= engine.shared_memory()
            if cycle < KILLS:
                load_until_killed(engine, reference, draw)
        assert bytes_below(folder) <= CAP_BYTES, where
        assert not strays(folder), where
    assert not [path for path in shared_memory if path.exists()]

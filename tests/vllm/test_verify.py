"""``"verify": "device"`` on a real engine compares what it should, and detects planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import copy_faults, faults
from tests.vllm.engine import Engine, EngineError
from tests.vllm.probes import totals
from tests.vllm.restored import HASH, config, prompts, settle
from tests.vllm.verified import Verified


def start(model: Path, tmp_path: Path, name: str) -> Engine:
    transfer = config(tmp_path / "kv")
    return Engine(model, log=tmp_path / f"{name}.log", connector=transfer, **HASH)


def ask_anew(engine: Engine, asked: list[list[int]]) -> tuple[int, Verified]:
    """Empty vLLM's own cache and send everything; return the cached tokens, and what was
    compared."""
    settle(engine)
    before = engine.verified()
    engine.reset_prefix_cache()
    tokens = sum(engine.generate_one(prompt).cached_tokens for prompt in asked)
    settle(engine)
    now = engine.verified()
    return tokens, Verified(
        now.equal - before.equal, now.different - before.different, now.unknown - before.unknown
    )


def test_whole_chunks_agree_and_planted_faults_do_not(llama: Path, tmp_path: Path) -> None:
    asked = prompts(2)
    with start(llama, tmp_path, "first") as engine:
        engine.may_differ = True
        for prompt in asked:
            engine.generate_one(prompt)
        tokens, found = ask_anew(engine, asked)
        assert tokens == 2 * 576
        assert found == Verified(18 + 9, 0, 0)  # half of the second prompt is in vLLM's own cache

        for fault, wrong in ((copy_faults.wrong_bit, 1), (copy_faults.swapped_chunks, 2)):
            engine.call(faults.on_workers, copy_faults.plant, fault, None)
            failed = engine.call(totals)["load_failures"]
            _, found = ask_anew(engine, asked[:1])
            engine.call(faults.on_workers, copy_faults.heal)
            assert found == Verified(18 - wrong, wrong, 0), fault.__name__
            assert engine.call(totals)["load_failures"] == failed + 1
            # The request was recomputed, and the chunk was stored again.
            assert ask_anew(engine, asked[:1])[1] == Verified(18, 0, 0)
        log = engine.log()
        assert log.count("is not what was computed") == 3
        assert "differ in 4 of 4 layers (model.layers.0.self_attn.attn, " in log  # a swapped pair
        assert "differ in 1 of 4 layers (model.layers.0.self_attn.attn)" in log  # a wrong bit
    with start(llama, tmp_path, "restarted") as engine:
        assert ask_anew(engine, asked[:1])[1] == Verified(18, 0, 0)
        engine.kill()
    with start(llama, tmp_path, "after a kill") as engine:
        assert ask_anew(engine, asked)[1] == Verified(18 + 9, 0, 0)


def test_a_block_overwritten_during_a_store_or_load_is_detected(
    llama: Path, tmp_path: Path
) -> None:
    asked = prompts(2)[:1]
    with start(llama, tmp_path, "log") as engine:
        engine.call(faults.on_workers, copy_faults.overwrite_stores, 0)
        engine.generate_one(asked[0])
        settle(engine)
        engine.call(faults.on_workers, copy_faults.heal_stores)
        assert ask_anew(engine, asked)[1] == Verified(0, 18, 0)
        assert ask_anew(engine, asked)[1] == Verified(18, 0, 0)

        engine.call(faults.on_workers, copy_faults.plant_late_writes)
        _, found = ask_anew(engine, asked)
        engine.call(faults.on_workers, copy_faults.heal)
        assert (found.different, found.unknown) == (1, 0)
        assert ask_anew(engine, asked)[1] == Verified(18, 0, 0)
        engine.planted_differences = 19


def break_the_comparison(worker: Any) -> None:
    faults.executor(worker)._verifier._give_up(RuntimeError("planted"))


def test_closing_an_engine_whose_comparison_has_ended_fails(llama: Path, tmp_path: Path) -> None:
    """Closing also fails for an engine that has found other differences than those that its test
    planted."""
    asked = prompts(2)[:1]
    with start(llama, tmp_path, "log") as engine:
        engine.generate_one(asked[0])
        assert ask_anew(engine, asked)[1] == Verified(18, 0, 0)
        engine.planted_differences = 1
        with pytest.raises(EngineError, match="are not what was computed"):
            engine._check_loads()
        engine.planted_differences = 0
        engine._check_loads()
        engine.call(faults.on_workers, break_the_comparison)
        assert ask_anew(engine, asked)[1] == Verified(0, 0, 18)
        with pytest.raises(EngineError, match="has ended with an error"):
            engine.close()

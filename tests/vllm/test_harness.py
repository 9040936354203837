"""Tests the harness itself: if it did not detect these faults, the other tests here would prove
nothing.

Answers are compared only if equal hits left the same tokens to compute, one request at a time:
other batch shapes use other kernels, whose last bits differ on some processors.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine, EngineError


def prompt(seed: int, tokens: int = 600) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(tokens)]


def num_running(llm: Any) -> int:
    return len(llm.llm_engine.engine_core.engine_core.scheduler.running)


def is_running(llm: Any) -> bool:
    return num_running(llm) > 0


def test_wrong_cached_bytes_are_detected(llama: Path, tmp_path: Path) -> None:
    with Engine(llama, log=tmp_path / "log") as engine:
        cold = engine.generate_one(prompt(1))
        before = engine.kv_snapshot()
        warm = engine.generate_one(prompt(1))
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == 576
        assert engine.generate_one(prompt(1)).same_output(warm)
        assert engine.kv_snapshot() == before
        assert len(before) == 18
        assert all(len(ranks[0]) == 4 * 8192 and any(ranks[0]) for ranks in before.values())

        blocks = list(engine.cached_blocks().values())
        # Keys contain their position (RoPE), so attention does not depend on the blocks in which
        # they are stored: swapping two blocks of one prompt does not change the output. Only the
        # bytes reveal it.
        engine.swap_blocks(0, blocks[3], blocks[4])
        assert engine.kv_snapshot() != before
        engine.swap_blocks(0, blocks[3], blocks[4])
        assert engine.kv_snapshot() == before

        engine.fill_blocks({0: [blocks[7]]})
        one_zeroed = engine.generate_one(prompt(1))
        assert one_zeroed.logprobs != warm.logprobs
        engine.fill_blocks({0: blocks})
        assert engine.generate_one(prompt(1)).tokens != warm.tokens

        engine.reset_prefix_cache()
        assert engine.cached_blocks() == {}
        again = engine.generate_one(prompt(1))
        assert again.cached_tokens == 0
        assert again.same_output(cold)
        assert engine.metrics()["vllm:prefix_cache_hits"] == 4 * 576


def test_requests_can_be_stepped_and_aborted(llama: Path, tmp_path: Path) -> None:
    with Engine(llama, log=tmp_path / "log") as engine:
        engine.submit("a", prompt(1, 300), max_tokens=64)
        engine.submit("b", prompt(2, 300), max_tokens=4)
        engine.step_until(is_running)
        engine.abort("a")
        finished = engine.run_until_finished()
        assert set(finished) == {"b"}
        # which one depends on the requests computed beside it
        assert len(finished["b"].tokens) == 4
        assert engine.call(num_running) == 0


def test_a_killed_engine_is_gone_and_reported(llama: Path, tmp_path: Path) -> None:
    with Engine(llama, log=tmp_path / "log") as engine:
        engine.kill()
        with pytest.raises(EngineError, match="the engine process"):
            engine.generate_one(prompt(1))


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)start.*log of the engine"):
        Engine(tmp_path / "no-such-model", log=tmp_path / "log")


@pytest.mark.thorough
def test_two_ranks_return_separate_bytes(llama: Path, tmp_path: Path) -> None:
    with Engine(llama, log=tmp_path / "log", tensor_parallel_size=2) as engine:
        engine.generate_one(prompt(1))
        snapshot = engine.kv_snapshot()
        assert all(len(ranks) == 2 and ranks[0] != ranks[1] for ranks in snapshot.values())
        assert all(len(ranks[0]) == 4 * 4096 for ranks in snapshot.values())
        warm = engine.generate_one(prompt(1))
        assert engine.generate_one(prompt(1)).same_output(warm)
        assert engine.kv_snapshot() == snapshot

"""Look-ahead on a real engine: prompts that wait are read from disk before they run, and no answer
changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import sick_disk
from tests.vllm.engine import Engine
from tests.vllm.faults import on_workers
from tests.vllm.kinds import empty_cpu_tier
from tests.vllm.probes import totals
from tests.vllm.protocol import Generation
from tests.vllm.restored import (
    HASH,
    Reference,
    config,
    fill,
    prompts,
    restore_and_verify,
    settle,
)
from tests.vllm.sick_disk import LONG, QUICKLY, SHORT, SLOWLY, tier_state

ONE_AT_A_TIME = {"max_num_seqs": 1}
TWO_PROMPTS = {"num_gpu_blocks_override": 48, "max_model_len": 1024}
"""vLLM lets as many requests load as fit into its blocks; the others wait."""
COUNT = 8


def submit_all(engine: Engine, reference: Reference) -> list[str]:
    """Send all prompts at once while they are only on disk; returns the names of the requests."""
    engine.reset_prefix_cache()
    engine.call(empty_cpu_tier)
    names = [f"prompt{number}" for number in range(len(reference.prompts))]
    for name, prompt in zip(names, reference.prompts, strict=True):
        engine.submit(name, prompt)
    return names


def ask_all_at_once(engine: Engine, reference: Reference) -> list[Generation]:
    names = submit_all(engine, reference)
    answers = engine.run_until_finished()
    return [answers[name] for name in names]


def used_bytes(engine: Engine) -> float:
    """The bytes that were read ahead and used, after everything has settled. All that was loaded
    must be what was computed, and everything that was read ahead must be accounted for."""
    found, counts = engine.verified(), engine.call(totals)
    assert found.equal > 0
    assert (found.different, found.unknown) == (0, 0)
    read, used, wasted = (counts[f"ahead_{what}_bytes"] for what in ("read", "used", "wasted"))
    assert read == used + wasted
    return used


@pytest.mark.parametrize("choice", ["never", "always"])
def test_a_backlog_is_read_ahead(choice: str, llama: Path, tmp_path: Path) -> None:
    """Prompts that are only on disk are sent all at once. Their answers are those without
    offloading, even if requests wait for their reads; then no request runs until some reads have
    ended."""
    reference = Reference.record(llama, tmp_path / "plain.log", prompts(COUNT), **ONE_AT_A_TIME)
    options = {"look_ahead": 0.5, "wait_for_reads": choice, "max_load_gpu_share": 1.0}
    transfer = config(tmp_path / "kv", **options)
    limits = HASH | ONE_AT_A_TIME | TWO_PROMPTS
    with Engine(llama, log=tmp_path / "log", connector=transfer, **limits) as engine:
        fill(engine, reference)
        answers = ask_all_at_once(engine, reference)
        compared = 0
        for number in range(COUNT):
            answer = answers[number]
            assert answer.cached_tokens > 0
            if expected := reference.answers.get((number, answer.cached_tokens)):
                assert answer.tokens == expected.tokens
                compared += 1
        assert compared > 0
        settle(engine)
        counts = engine.call(totals)
        assert counts["load_failures"] == 0
        assert used_bytes(engine) > 0
        assert (counts["read_waits"] > 0) == (choice == "always")
        assert (counts["read_wait_seconds"] > 0) == (choice == "always")


def has_read_ahead(llm: Any) -> bool:
    return totals(llm)["ahead_read_bytes"] > 0


@pytest.mark.parametrize(
    "state",
    [
        "hangs",
        pytest.param("fails", marks=pytest.mark.thorough),
        pytest.param("crawls", marks=pytest.mark.thorough),
    ],
)
def test_a_disk_turns_sick_while_it_is_read_ahead(state: str, llama: Path, tmp_path: Path) -> None:
    """Every request is answered. When the disk works again, prompts are read ahead again."""
    reference = Reference.record(llama, tmp_path / "plain.log", prompts(COUNT), **ONE_AT_A_TIME)
    options = {"look_ahead": 0.5, "max_load_gpu_share": 1.0, "break_even": True}
    transfer = config(tmp_path / "kv", breaker_failures=3, **options)
    limits = HASH | ONE_AT_A_TIME | TWO_PROMPTS
    with Engine(llama, log=tmp_path / "log", connector=transfer, **limits) as engine:
        engine.call(sick_disk.retry_soon)
        engine.call(sick_disk.compute_at, *SLOWLY)
        fill(engine, reference)
        engine.call(on_workers, sick_disk.infect, "crawls")
        names = submit_all(engine, reference)
        engine.step_until(has_read_ahead)
        assert len(engine.states()) > 1, "no request waits any more"
        engine.call(on_workers, sick_disk.set_limits, *SHORT)
        engine.call(sick_disk.compute_at, *(QUICKLY if state == "crawls" else SLOWLY))
        engine.call(on_workers, sick_disk.infect, state)
        answers = engine.run_until_finished()
        assert all(answers[name].tokens for name in names)
        assert engine.call(on_workers, sick_disk.disk_calls)[0] > 0, "the fault never occurred"
        engine.call(on_workers, sick_disk.infect, "well")
        engine.call(on_workers, sick_disk.set_limits, *LONG)
        engine.call(sick_disk.compute_at, *SLOWLY)
        while not engine.call(tier_state)[0]:
            ask_all_at_once(engine, reference)
            settle(engine)
        settle(engine)
        before = used_bytes(engine)
        ask_all_at_once(engine, reference)
        settle(engine)
        assert used_bytes(engine) > before
        engine.call(empty_cpu_tier)
        assert restore_and_verify(engine, reference, "lmdb") > 0

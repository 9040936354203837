"""Look-ahead on a real engine: prompts that wait are read from disk before they run, and no answer
changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine import Engine
from tests.vllm.kinds import empty_cpu_tier
from tests.vllm.probes import totals
from tests.vllm.restored import HASH, Reference, config, fill, prompts, settle

ONE_AT_A_TIME = {"max_num_seqs": 1}
TWO_PROMPTS = {"num_gpu_blocks_override": 48, "max_model_len": 1024}
"""vLLM lets as many requests load as fit into its blocks; the others wait."""
COUNT = 8


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
        engine.reset_prefix_cache()
        engine.call(empty_cpu_tier)
        for number, prompt in enumerate(reference.prompts):
            engine.submit(f"again{number}", prompt)
        answers = engine.run_until_finished()
        compared = 0
        for number in range(COUNT):
            answer = answers[f"again{number}"]
            assert answer.cached_tokens > 0
            if expected := reference.answers.get((number, answer.cached_tokens)):
                assert answer.tokens == expected.tokens
                compared += 1
        assert compared > 0
        settle(engine)
        found, counts = engine.verified(), engine.call(totals)
        assert found.equal > 0
        assert (found.different, found.unknown) == (0, 0)
        assert counts["load_failures"] == 0
        read, used, wasted = (counts[f"ahead_{what}_bytes"] for what in ("read", "used", "wasted"))
        assert read == used + wasted
        assert used > 0
        assert (counts["read_waits"] > 0) == (choice == "always")
        assert (counts["read_wait_seconds"] > 0) == (choice == "always")

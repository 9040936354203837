"""Loading and computing on a real engine: of a burst of requests over a slow disk, some are loaded
and the others are computed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.planner.load_or_recompute import SAMPLES_MIN
from tests.vllm import sick_disk
from tests.vllm.engine import Engine
from tests.vllm.faults import on_workers
from tests.vllm.kinds import empty_cpu_tier
from tests.vllm.probes import connector, totals
from tests.vllm.restored import (
    HASH,
    Reference,
    config,
    fill,
    loaded_tokens,
    prompts,
    restore_and_verify,
    settle,
)

COUNT = 8


def compute_at_half_the_disks_speed(llm: Any) -> None:
    """One load pays, but if all waited for the disk, computing some would be faster."""
    disk = connector(llm).serving.side.planner.health[0].break_even
    assert disk.pays
    sick_disk.compute_at(llm, disk.rate.value() / 2)


def test_a_burst_over_a_slow_disk_is_loaded_in_part(llama: Path, tmp_path: Path) -> None:
    reference = Reference.record(llama, tmp_path / "plain.log", prompts(COUNT))
    options = {"look_ahead": 0.0, "max_load_gpu_share": 1.0, "break_even": True}
    transfer = config(tmp_path / "kv", **options)
    with Engine(llama, log=tmp_path / "log", connector=transfer, **HASH) as engine:
        engine.call(sick_disk.compute_at, *sick_disk.SLOWLY)
        fill(engine, reference)
        engine.call(on_workers, sick_disk.infect, "crawls")
        for prompt in reference.prompts[:SAMPLES_MIN]:
            engine.reset_prefix_cache()
            engine.call(empty_cpu_tier)
            engine.generate_one(prompt)
            settle(engine)
        engine.call(compute_at_half_the_disks_speed)
        engine.reset_prefix_cache()
        engine.call(empty_cpu_tier)
        before, shortened = loaded_tokens(engine, "lmdb"), engine.call(totals)["short_loads"]
        answers = engine.generate(reference.prompts)
        settle(engine)
        assert engine.call(totals)["short_loads"] > shortened
        loaded = loaded_tokens(engine, "lmdb") - before
        assert loaded > len(reference.prompts[0]), "only the first load did not wait for others"
        assert 0 in {answer.cached_tokens for answer in answers}, "every prompt waited for the disk"
        assert engine.call(totals)["load_failures"] == 0
        engine.call(on_workers, sick_disk.infect, "well")
        engine.call(sick_disk.compute_at, *sick_disk.SLOWLY)
        assert restore_and_verify(engine, reference, "cpu") > 0
        found = engine.verified()
        assert (found.different, found.unknown) == (0, 0)

"""Two real engines at a time over one shared folder: each restores what the other computed; killing
one does not affect the other; one with new weights no longer shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Engine
from tests.vllm.restored import (
    HASH,
    Reference,
    all_were_compared,
    ask,
    by_hit,
    config,
    loaded_tokens,
    planted_faults_are_seen,
    prompts,
    settle,
)
from tiers.folders.folder import MEMBERS_MAX

KINDS = ["lmdb", pytest.param("file", marks=pytest.mark.thorough)]


def connector(path: Path, kind: str) -> dict[str, Any]:
    tier = {"type": kind, "path": str(path), "capacity": "256MiB", "reserve": 0, "shared": True}
    return config(None, tiers=[tier])


def compute(engine: Engine, asked: list[list[int]], tier: str) -> Reference:
    """The engine's answer when it has to compute everything; its blocks are stored when this
    returns."""
    before = loaded_tokens(engine, tier)
    cold = [engine.generate_one(prompt) for prompt in asked]
    assert loaded_tokens(engine, tier) == before, "it was computed before"
    warm = [engine.generate_one(prompt) for prompt in asked]
    settle(engine)
    return Reference(asked, by_hit([*cold, *warm], len(asked)))


def restore(engine: Engine, computed: Reference, tier: str) -> None:
    """The engine gets the same blocks from the shared folder: answers and log-probabilities must be
    equal."""
    before = loaded_tokens(engine, tier)
    assert ask(engine, computed) > 0
    assert loaded_tokens(engine, tier) - before > len(computed.prompts[0]) // 2
    assert all_were_compared(engine)
    settle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_restore_what_others_computed(llama: Path, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"connector": connector(tmp_path / "kv", kind), **HASH}
    one = Engine(llama, log=tmp_path / "one.log", **options)
    with Engine(llama, log=tmp_path / "two.log", **options) as two:
        restore(two, compute(one, prompts(2, seed=1), kind), kind)
        of_two = compute(two, prompts(2, seed=2), kind)
        restore(one, of_two, kind)
        one.submit("in flight", prompts(1, seed=3)[0])
        one.step(3)
        one.kill()
        of_two_alone = compute(two, prompts(2, seed=4), kind)
        with Engine(llama, log=tmp_path / "three.log", **options) as three:
            restore(three, of_two, kind)
            restore(three, of_two_alone, kind)
            three.reset_prefix_cache(connector=True)
            of_three = compute(three, prompts(2, seed=5), kind)
            # not the blocks that were stored under other weights
            compute(two, prompts(2, seed=5), kind)
            three.reset_prefix_cache()
            restore(three, of_three, "cpu")
            planted_faults_are_seen(three, of_three)
    if kind == "lmdb":
        locks = list((tmp_path / "kv").glob("*/replica-0/rank-0/sharer-*.lock"))
        assert 2 <= len(locks) < MEMBERS_MAX

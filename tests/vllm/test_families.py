"""Each tiny family starts on plain vLLM, has the KV groups that its entry lists, and its output
depends on the cached bytes. Without this, a test of a family with the connector would prove
nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.models.families import FAMILIES, Family
from tests.vllm.engine import Engine


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_family(family: Family, tmp_path: Path) -> None:
    if family.missing():
        pytest.skip(family.missing())
    model = family.make(tmp_path / "model")
    rng = random.Random(1)
    prompt = [rng.randrange(256) for _ in range(family.prompt_tokens)]
    with Engine(model, log=tmp_path / "log", **family.kwargs(model)) as engine:
        groups = engine.geometry["groups"]
        assert tuple((g["kind"], g["block_size"]) for g in groups) == family.groups
        assert engine.generate_one(prompt).cached_tokens == 0
        warm = engine.generate_one(prompt)
        assert (warm.cached_tokens > 0) == family.hits
        blocks: dict[int, list[int]] = {}
        for key, block in engine.cached_blocks().items():
            blocks.setdefault(int.from_bytes(key[-4:], "big"), []).append(block)
        assert set(blocks) == (set(range(len(groups))) if family.hits else set())
        for group, ids in blocks.items():  # each group by itself affects the output
            engine.fill_blocks({group: ids})
            damaged = engine.generate_one(prompt)
            assert damaged.cached_tokens == warm.cached_tokens
            assert damaged.logprobs != warm.logprobs, f"group {group} does not affect the output"
            warm = damaged

"""Real engines that read what engines of another tensor parallel size have stored.

The right answer is the engine's own with the same bytes in its own prefix cache: they are cut from
what the other engine had in its memory, by ``moved`` below, and planted past everything under test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.models.families import FAMILIES
from tests.vllm.engine import Engine, EngineError, transfer_config
from tests.vllm.kinds import Blocks, Kind, ask, compare_outputs
from tests.vllm.protocol import Prompt
from tests.vllm.restored import loaded_tokens, prompts, settle

UNREAD = {"extra_args": {"kv_transfer_params": {"kvtiers": {"tiers": {"read": []}}}}}
THOROUGH = bool(os.environ.get("KVTIERS_TEST_ALL_GEOMETRIES"))
FAMILY = ["llama", "deepseek_v2"]
MORE = [] if not THOROUGH else ["llama_one_head", "mistral", "gemma3"]


def connector(path: Path, geometry: str, capacity: str = "256MiB", **others: Any) -> dict[str, Any]:
    """An LMDB tier that takes part in geometry as told. These models have no weight files; the
    engine's id stands for them."""
    tier = {"type": "lmdb", "path": str(path), "capacity": capacity, "reserve": 0}
    tiers = [tier | {"geometry": geometry}]
    extra = {"cpu": {"capacity": "64MiB"}, "tiers": tiers} | others
    return transfer_config(extra) | {"engine_id": "geometry"}


def kind(family: str, ranks: int) -> Kind:
    return Kind(family, {"tensor_parallel_size": ranks} if ranks > 1 else {})


def moved(family: str, block: tuple[bytes, ...], layers: int, ranks: int) -> tuple[bytes, ...]:
    """A block as ``ranks`` ranks have it, from what other ranks have. vLLM's CPU attention keeps
    a layer's heads one after the other, and ranks have them in their order; latents are copies."""
    if family.startswith("deepseek"):
        assert len(set(block)) == 1, "the ranks' latents differ"
        return (block[0],) * ranks
    if ranks == 1:
        return (b"".join(part for layer in range(layers) for part in pages(block, layer, layers)),)
    whole = block[0]
    page = len(whole) // layers
    half = page // ranks
    return tuple(
        b"".join(
            whole[at + rank * half : at + (rank + 1) * half] for at in range(0, len(whole), page)
        )
        for rank in range(ranks)
    )


def pages(block: tuple[bytes, ...], layer: int, layers: int) -> list[bytes]:
    size = len(block[0]) // layers
    return [rank[layer * size : (layer + 1) * size] for rank in block]


def layers_of(engine: Engine) -> int:
    return len(engine.geometry["groups"][0]["layers"])


def show_read_translated(
    engine: Engine, family: str, stored: Blocks, asked: list[Prompt], ranks: int
) -> None:
    """The engine has just started: everything comes from the other's records, bytes and answers are
    what they must be, and the comparison sees a wrong byte."""
    layers = layers_of(engine)
    right = {key: moved(family, block, layers, ranks) for key, block in stored.items()}
    answers = ask(engine, asked)
    found = engine.kv_snapshot()
    common = found.keys() & right.keys()
    assert loaded_tokens(engine, "lmdb_translated") > 0
    assert loaded_tokens(engine, "lmdb") == loaded_tokens(engine, "cpu") == 0
    assert answers[0].cached_tokens == answers[1].cached_tokens >= len(asked[0]) // 2
    wrong = [key.hex()[:16] for key in common if found[key] != right[key]]
    assert not wrong, f"{len(wrong)} of {len(common)} blocks have other bytes: {wrong[:4]}"
    block_tokens = engine.geometry["groups"][0]["block_size"]
    assert len(common) * block_tokens >= answers[0].cached_tokens
    settle(engine)
    assert engine.reset_prefix_cache()
    for prompt in asked:
        assert engine.generate_one(prompt, **UNREAD).cached_tokens <= len(prompt) // 2
    engine.plant_blocks(right)
    planted = [engine.generate_one(prompt, **UNREAD) for prompt in asked]
    assert [a.cached_tokens for a in planted] == [a.cached_tokens for a in answers]
    compare_outputs(answers, planted)
    settle(engine)
    faulty = {key: tuple(bytes(len(part)) for part in block) for key, block in right.items()}
    engine.plant_blocks(faulty)
    with pytest.raises(AssertionError, match="other"):
        compare_outputs([engine.generate_one(prompt, **UNREAD) for prompt in asked], planted)


@pytest.mark.parametrize("family", FAMILY + MORE)
def test_tensor_parallel_sizes_read_each_other(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "kv", tmp_path / "model"
    first, second = kind(family, 2).prompts(), prompts(2, FAMILIES[family].prompt_tokens, seed=9)

    folder, options = kind(family, 2).make(model)
    with Engine(
        folder, log=tmp_path / "two.log", connector=connector(path, "own", "48MiB"), **options
    ) as two:
        ask(two, first)
        by_two = two.kv_snapshot()
        settle(two)

    folder, options = kind(family, 1).make(model)
    with Engine(
        folder, log=tmp_path / "one.log", connector=connector(path, "translate"), **options
    ) as one:
        show_read_translated(one, family, by_two, first, 1)
        assert one.reset_prefix_cache()
        ask(one, second)
        by_one = {key: block for key, block in one.kv_snapshot().items() if key not in by_two}
        settle(one)

    folder, options = kind(family, 2).make(model)
    translate = connector(path, "translate", "512MiB")
    with Engine(folder, log=tmp_path / "again.log", connector=translate, **options) as two:
        show_read_translated(two, family, by_one, second, 2)

    refused = connector(path, "translate", "1GiB", chunk_blocks=2)
    folder, options = kind(family, 1).make(model)
    with pytest.raises(EngineError) as error:
        Engine(folder, log=tmp_path / "refused.log", connector=refused, **options)
    assert_refused(str(error.value), "groups[0].chunk_tokens is")
    assert '"chunk_blocks": 1' in str(error.value)


def assert_refused(text: str, field: str) -> None:
    assert "holds blocks of this model that this engine must not read" in text
    assert field in text
    assert 'Use another path, start with the same flags, or set "geometry": "own"' in text


@pytest.mark.skipif(not THOROUGH, reason="set KVTIERS_TEST_ALL_GEOMETRIES=1 (a minute more)")
def test_recurrent_states_of_other_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    folder, options = kind("qwen3_next", 2).make(tmp_path / "model")
    own = connector(path, "own", "96MiB")
    with Engine(folder, log=tmp_path / "two.log", connector=own, **options) as two:
        ask(two, kind("qwen3_next", 2).prompts()[:1])
        settle(two)
    folder, options = kind("qwen3_next", 1).make(tmp_path / "model")
    translate = connector(path, "translate", "512MiB")
    with pytest.raises(EngineError) as error:
        Engine(folder, log=tmp_path / "one.log", connector=translate, **options)
    assert_refused(str(error.value), "parallel.tensor is 2 stored, 1 now: layer")
    assert "--tensor-parallel-size 2" in str(error.value)

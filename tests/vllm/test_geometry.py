"""Real engines that read what engines of another tensor parallel size have stored.

The right answer is the engine's own with the same bytes in its own prefix cache: they are cut from
what the other engine had in its memory, by ``moved`` below, and planted past everything under test.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.tiny_model import LlamaShape, make_llama
from tests.models.families import FAMILIES
from tests.vllm.engine import Engine, EngineError, transfer_config
from tests.vllm.kinds import Blocks, Kind, ask, compare_outputs, group_of
from tests.vllm.protocol import Prompt
from tests.vllm.restored import loaded_tokens, prompts, settle

UNREAD = {"extra_args": {"kv_transfer_params": {"kvtiers": {"tiers": {"read": []}}}}}
THOROUGH = bool(os.environ.get("KVTIERS_TEST_ALL_GEOMETRIES"))
FAMILY = ["llama", "deepseek_v2"]
MORE = ["one_head", "gemma3"] if THOROUGH else []


def connector(
    path: Path, geometry: str, capacity: str, *, shared: bool = False, **others: Any
) -> dict[str, Any]:
    """An LMDB tier that takes part in geometry as told. These models have no weight files; the
    engine's id stands for them."""
    tier = {"type": "lmdb", "path": str(path), "capacity": capacity, "reserve": 0}
    tiers = [tier | {"geometry": geometry, "shared": shared}]
    # Shared folders are asked; a busy machine may take its time for the answer.
    extra = {"cpu": {"capacity": "64MiB"}, "tiers": tiers, "lookup_timeout_s": 10} | others
    return transfer_config(extra) | {"engine_id": "geometry"}


def made(family: str, ranks: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The model's folder and the engine's options. ``one_head`` has fewer KV heads than ranks."""
    known = "llama" if family == "one_head" else family
    changes = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    if family == "one_head":
        make_llama(folder, shape=LlamaShape(kv_heads=1))
    return Kind(known, changes).make(folder)


def moved(family: str, block: tuple[bytes, ...], layers: int, ranks: int) -> tuple[bytes, ...]:
    """A block as ``ranks`` ranks have it, from what other ranks have. vLLM's CPU attention keeps
    a layer's heads one after the other, and ranks have them in their order; latents are copies."""
    if family in ("deepseek_v2", "one_head"):
        assert len(set(block)) == 1, "the ranks' copies differ"
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


def show_read_translated(
    engine: Engine, family: str, stored: Blocks, asked: list[Prompt], ranks: int
) -> None:
    """The engine has just started: everything comes from the other's records, bytes and answers are
    what they must be, and the comparison sees a wrong byte."""
    layers = [len(group["layers"]) for group in engine.geometry["groups"]]
    right = {
        key: moved(family, block, layers[group_of(key)], ranks) for key, block in stored.items()
    }
    first = engine.generate_one(asked[0])
    assert loaded_tokens(engine, "lmdb_translated") >= first.cached_tokens > 0
    assert loaded_tokens(engine, "lmdb") == loaded_tokens(engine, "cpu") == 0
    answers = [first, *ask(engine, asked[1:])]
    found = engine.kv_snapshot()
    common = found.keys() & right.keys()
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
    tokens = FAMILIES["llama" if family == "one_head" else family].prompt_tokens
    first, second = prompts(2, tokens), prompts(2, tokens, seed=9)

    is_live = family == "llama"  # the first engine runs on, beside the one that reads its records
    folder, options = made(family, 2, model)
    own = connector(path, "own", "48MiB", shared=is_live)
    with ExitStack() as engines:
        log = tmp_path / "two.log"
        two = engines.enter_context(Engine(folder, log=log, connector=own, **options))
        ask(two, first)
        by_two = two.kv_snapshot()
        settle(two)
        if not is_live:
            two.close()

        folder, options = made(family, 1, model)
        translate = connector(path, "translate", "256MiB", shared=is_live)
        log = tmp_path / "one.log"
        one = engines.enter_context(Engine(folder, log=log, connector=translate, **options))
        show_read_translated(one, family, by_two, first, 1)
        assert one.reset_prefix_cache()
        ask(one, second)
        by_one = {key: block for key, block in one.kv_snapshot().items() if key not in by_two}
        settle(one)
        if is_live:
            show_what_came_later(two, one, prompts(1, tokens, seed=11)[0])

    folder, options = made(family, 2, model)
    translate = connector(path, "translate", "512MiB", shared=is_live)
    with Engine(folder, log=tmp_path / "again.log", connector=translate, **options) as two:
        show_read_translated(two, family, by_one, second, 2)
    if is_live:
        chunks_that_end_elsewhere_are_refused(path, folder, tmp_path / "refused.log", options)


def show_what_came_later(writer: Engine, reader: Engine, prompt: Prompt) -> None:
    """Engines that share a folder find what the other stores while both run."""
    writer.generate_one(prompt)
    stored = writer.kv_snapshot()
    settle(writer)
    before = loaded_tokens(reader, "lmdb_translated")
    answer = reader.generate_one(prompt)
    assert loaded_tokens(reader, "lmdb_translated") - before == answer.cached_tokens > 0
    layers = len(reader.geometry["groups"][0]["layers"])
    found = reader.kv_snapshot()
    common = found.keys() & stored.keys()
    assert len(common) * 32 >= answer.cached_tokens
    assert all(found[key] == moved("llama", stored[key], layers, 1) for key in common)
    settle(reader)


def chunks_that_end_elsewhere_are_refused(
    path: Path, folder: Path, log: Path, options: dict[str, Any]
) -> None:
    refused = connector(path, "translate", "1GiB", chunk_blocks=2)
    with pytest.raises(EngineError) as error:
        Engine(folder, log=log, connector=refused, **options)
    assert_refused(str(error.value), "groups[0].chunk_tokens is 32 (1 blocks of 32) stored, 64 (2")
    assert '(it was written with --block-size 32 and "chunk_blocks": 1)' in str(error.value)


def assert_refused(text: str, field: str) -> None:
    assert "holds blocks of this model that this engine must not read" in text
    assert field in text
    assert 'Use another path, start with the same flags, or set "geometry": "own"' in text


@pytest.mark.skipif(not THOROUGH, reason="set KVTIERS_TEST_ALL_GEOMETRIES=1 (a minute more)")
def test_recurrent_states_of_other_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    folder, options = made("qwen3_next", 2, tmp_path / "model")
    own = connector(path, "own", "96MiB")
    with Engine(folder, log=tmp_path / "two.log", connector=own, **options) as two:
        ask(two, Kind("qwen3_next").prompts()[:1])
        settle(two)
    folder, options = made("qwen3_next", 1, tmp_path / "model")
    translate = connector(path, "translate", "512MiB")
    with pytest.raises(EngineError) as error:
        Engine(folder, log=tmp_path / "one.log", connector=translate, **options)
    assert_refused(str(error.value), "parallel.tensor is 2 stored, 1 now: layer")
    assert "--tensor-parallel-size 2" in str(error.value)

"""Real engines of one model in different geometries: converts the bytes of one into the form of the
other, and proves that one restores what the other has stored.

The right answer is the engine's own answer with the same bytes in its own prefix cache. These bytes
are cut from the other engine's memory by ``moved``, and written there without any code under test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.tiny_model import LlamaShape, make_llama
from tests.vllm.engine import Engine
from tests.vllm.kinds import Blocks, Kind, ask, compare_outputs, group_of
from tests.vllm.probes import totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import loaded_tokens, settle

UNREAD = {"extra_args": {"kv_transfer_params": {"kvtiers": {"tiers": {"read": []}}}}}


def made(family: str, ranks: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The model's folder and the engine's options. ``one_head`` has fewer KV heads than ranks."""
    known = "llama" if family == "one_head" else family
    changes = {"tensor_parallel_size": ranks} if ranks > 1 else {}
    if family == "one_head":
        make_llama(folder, shape=LlamaShape(kv_heads=1))
    return Kind(known, changes).make(folder)


def moved(family: str, block: tuple[bytes, ...], layers: int, ranks: int) -> tuple[bytes, ...]:
    """Convert a block from other ranks to the form in which ``ranks`` ranks store it. vLLM's CPU
    attention stores a layer's heads one after the other, and ranks have them in order; latents are
    copies."""
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
    engine: Engine,
    family: str,
    stored: Blocks,
    asked: list[Prompt],
    ranks: int,
    tier: str = "lmdb",
) -> None:
    """The engine has just started: everything must come from the other's records, bytes and answers
    must be right, and the comparison must detect a wrong byte. A digest covers a whole block of one
    geometry, so the engine cannot compare translated chunks with what was computed."""
    engine.may_be_unknown = True
    layers = [len(group["layers"]) for group in engine.geometry["groups"]]
    right = {
        key: moved(family, block, layers[group_of(key)], ranks) for key, block in stored.items()
    }
    first = engine.generate_one(asked[0])
    translated = loaded_tokens(engine, f"{tier}_translated")
    assert translated >= first.cached_tokens > 0, engine.call(totals)
    assert loaded_tokens(engine, tier) == loaded_tokens(engine, "cpu") == 0
    answers = [first, *ask(engine, asked[1:])]
    found = engine.kv_snapshot()
    common = found.keys() & right.keys()
    assert answers[0].cached_tokens == answers[1].cached_tokens >= len(asked[0]) // 2
    wrong = [key.hex()[:16] for key in common if found[key] != right[key]]
    assert not wrong, f"{len(wrong)} of {len(common)} blocks have other bytes: {wrong[:4]}"
    block_tokens = engine.geometry["groups"][0]["block_size"]
    assert len(common) * block_tokens >= answers[0].cached_tokens
    settle(engine)
    engine.reset_prefix_cache()
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


def show_what_came_later(
    writer: Engine, reader: Engine, prompt: Prompt, tier: str = "lmdb"
) -> None:
    """Engines that share a folder or a store must find each other's blocks while both run."""
    writer.generate_one(prompt)
    stored = writer.kv_snapshot()
    settle(writer)
    before = loaded_tokens(reader, f"{tier}_translated")
    answer = reader.generate_one(prompt)
    translated = loaded_tokens(reader, f"{tier}_translated") - before
    assert translated == answer.cached_tokens > 0, reader.call(totals)
    layers = len(reader.geometry["groups"][0]["layers"])
    found = reader.kv_snapshot()
    common = found.keys() & stored.keys()
    assert len(common) * 32 >= answer.cached_tokens
    assert all(found[key] == moved("llama", stored[key], layers, 1) for key in common)
    settle(reader)


def assert_refused(text: str, field: str, another: str = "path") -> None:
    assert "holds blocks of this model that this engine must not read" in text
    assert field in text
    assert f'Use another {another}, start with the same flags, or set "geometry": "own"' in text

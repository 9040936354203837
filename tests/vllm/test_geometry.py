"""Real engines that read blocks which engines of another tensor parallel size have left in a
folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.models.families import FAMILIES
from tests.vllm.engine import Engine, EngineError
from tests.vllm.kinds import Kind, ask
from tests.vllm.other_geometry import (
    assert_refused,
    made,
    show_read_translated,
    show_what_came_later,
)
from tests.vllm.restored import config, prompts, settle

THOROUGH = ["deepseek_v2", "one_head", "gemma3"]
FAMILY = ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)]


def connector(
    path: Path, geometry: str, capacity: str, *, shared: bool = False, **others: Any
) -> dict[str, Any]:
    """An LMDB tier with this ``geometry`` setting. These models have no weight files, so the
    engine's id identifies them."""
    tier = {"type": "lmdb", "path": str(path), "capacity": capacity, "reserve": 0}
    tiers = [tier | {"geometry": geometry, "shared": shared}]
    return config(None, tiers=tiers, **others) | {"engine_id": "geometry"}


@pytest.mark.parametrize("family", FAMILY)
def test_tensor_parallel_sizes_read_each_other(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "kv", tmp_path / "model"
    tokens = FAMILIES["llama" if family == "one_head" else family].prompt_tokens
    first, second = prompts(2, tokens), prompts(2, tokens, seed=9)

    # the first engine keeps running, beside the one that reads its records
    is_live = family == "llama"
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
        one.reset_prefix_cache()
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


def chunks_that_end_elsewhere_are_refused(
    path: Path, folder: Path, log: Path, options: dict[str, Any]
) -> None:
    refused = connector(path, "translate", "1GiB", chunk_blocks=2)
    with pytest.raises(EngineError) as error:
        Engine(folder, log=log, connector=refused, **options)
    assert_refused(
        str(error.value), "groups[0].chunk_tokens was 32 (1 blocks of 32) when stored and is 64 (2"
    )
    assert '(it was written with --block-size 32 and "chunk_blocks": 1)' in str(error.value)


@pytest.mark.thorough
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
    assert_refused(str(error.value), "parallel.tensor was 2 when stored and is 1 now: layer")
    assert "--tensor-parallel-size 2" in str(error.value)

"""If Model Runner V2 zeroed or wrote blocks later than the connector believes, tests would see it:
faults are planted in V2 itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model_runner import IS_V2
from tests.models.families import FAMILIES
from tests.vllm import late_work
from tests.vllm.engine import Engine
from tests.vllm.faults import on_workers
from tests.vllm.kinds import (
    Kind,
    fails_and_is_recomputed,
    loads_without_differences,
    record_loads,
    take_loads,
    wrong_blocks,
)
from tests.vllm.probes import connector
from tests.vllm.restored import HASH, config, prompts, settle

pytestmark = pytest.mark.skipif(not IS_V2, reason="the faults are planted in Model Runner V2")


def zero_loaded_groups(llm: Any) -> None:
    """From now on, vLLM zeroes the blocks of a load as well, in the step that begins the load."""
    connector(llm).get_loaded_kv_cache_group_ids = lambda _request: ()


def test_blocks_that_v2_zeroes_after_their_load_are_seen(tmp_path: Path) -> None:
    """By the comparison after each load. vLLM zeroes blocks of models with recurrent states."""
    kind = Kind("granite_hybrid")
    if missing := FAMILIES[kind.family].missing():
        pytest.skip(missing)
    model, options = kind.make(tmp_path / "model")
    [asked, _] = kind.prompts()
    with Engine(model, log=tmp_path / "log", connector=config(None), **options) as engine:
        engine.generate_one(asked, max_tokens=1)
        settle(engine)
        engine.call(zero_loaded_groups)
        loads_without_differences(engine, asked)  # zeroed, and then loaded
        engine.call(on_workers, late_work.zero_late)
        fails_and_is_recomputed(engine, asked, None, "blocks that were zeroed late")
        assert sum(engine.call(on_workers, late_work.zeroed)) > 0
        engine.call(on_workers, late_work.zero_in_time)
        settle(engine)
        loads_without_differences(engine, asked)


def restore(engine: Engine, asked: list[int]) -> tuple[set[bytes], list[bytes]]:
    """Restore a prompt that was just computed from the CPU tier. Returns the keys of the loaded
    blocks, and of those the ones whose bytes differ from vLLM's own."""
    own = engine.kv_snapshot()
    settle(engine)
    engine.call(take_loads)
    engine.reset_prefix_cache()
    engine.generate_one(asked, max_tokens=1)
    keys = engine.call(take_loads).keys
    return keys, wrong_blocks(engine.kv_snapshot(), own, keys)


def test_blocks_that_v2_writes_after_their_store_are_seen(llama: Path, tmp_path: Path) -> None:
    """By comparing bytes with vLLM's own cache, as ``test_kinds`` does. ``verify`` cannot see it:
    it digests a block in the same hook, before V2 has written."""
    late, in_time = prompts(3)[::2]
    with Engine(llama, log=tmp_path / "log", connector=config(None), **HASH) as engine:
        engine.call(record_loads)
        engine.call(on_workers, late_work.write_late)
        engine.generate_one(late, max_tokens=1)
        engine.call(on_workers, late_work.write_in_time)
        keys, wrong = restore(engine, late)
        assert len(keys) == 18
        assert wrong == sorted(keys)
        engine.generate_one(in_time, max_tokens=1)
        keys, wrong = restore(engine, in_time)
        assert len(keys) == 18
        assert wrong == []

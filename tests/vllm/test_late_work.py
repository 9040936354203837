"""If Model Runner V2 zeroed or wrote blocks later than the connector assumes, tests would detect
it: faults are planted in V2 itself."""

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
from tests.vllm.probes import connector, totals
from tests.vllm.restored import HASH, config, prompts, settle

pytestmark = pytest.mark.skipif(not IS_V2, reason="the faults are planted in Model Runner V2")


SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 24,
    "max_model_len": 1024,
    "prefix_match_unit": 32,
}
"""A KV cache in which the blocks of a prompt are reused at once."""


def zero_loaded_groups(llm: Any) -> None:
    """From now on, vLLM zeroes the blocks of a load as well, in the step that begins the load."""
    connector(llm).get_loaded_kv_cache_group_ids = lambda _request: ()


def test_blocks_that_v2_zeroes_after_their_load_are_seen(tmp_path: Path) -> None:
    """The comparison after each load detects them. vLLM zeroes blocks of models with recurrent
    states."""
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


def copied_while_stored(engine: Engine, asked: list[int], other: list[int]) -> int:
    """Store a prompt, and let V2 give its blocks to another one before the stores have read them.
    Returns how many blocks it overwrote by copies: on write, or of states."""
    engine.call(on_workers, late_work.hold_stores)
    engine.generate_one(asked, max_tokens=1)
    engine.generate_one(other, max_tokens=1)
    [seen] = engine.call(on_workers, late_work.release_stores)
    settle(engine)
    return len(seen["copied"] | seen["moved"])


def wrong_when_loaded(engine: Engine, asked: list[int]) -> int:
    """Load the states at each end of a block, and the blocks before it; return how many chunks are
    not what was computed."""
    before = engine.verified().different
    for end in range(129, len(asked), 128):
        engine.reset_prefix_cache()
        engine.generate_one(asked[:end], max_tokens=1)
        settle(engine)
    return engine.verified().different - before


def test_blocks_that_v2_copies_into_before_the_fence_are_not_stored(tmp_path: Path) -> None:
    """V2 copies blocks on write, and states to the next block, before it calls the connector. With
    a ``prefix_match_unit`` below the block size, hits end inside blocks."""
    kind = Kind("granite_hybrid", SMALL)
    model, options = kind.make(tmp_path / "model")
    asked = prompts(16)[::2]
    with Engine(model, log=tmp_path / "log", connector=config(None), **options) as engine:
        engine.may_differ = True
        engine.call(on_workers, late_work.trust_late_fences, True)
        while not copied_while_stored(engine, *asked[:2]):
            del asked[:2]
        assert wrong_when_loaded(engine, asked[0])
        engine.call(on_workers, late_work.trust_late_fences, False)
        failed = engine.call(totals)["store_failures:cpu"]
        del asked[:2]
        while not copied_while_stored(engine, *asked[:2]):
            del asked[:2]
        assert wrong_when_loaded(engine, asked[0]) == 0
        assert engine.call(totals)["store_failures:cpu"] > failed


def restore(engine: Engine, asked: list[int]) -> tuple[set[bytes], list[bytes]]:
    """Restore a prompt from the CPU tier that was just computed. Returns the keys of the loaded
    blocks, and the keys of those whose bytes differ from vLLM's own."""
    own = engine.kv_snapshot()
    settle(engine)
    engine.call(take_loads)
    engine.reset_prefix_cache()
    engine.generate_one(asked, max_tokens=1)
    keys = engine.call(take_loads).keys
    return keys, wrong_blocks(engine.kv_snapshot(), own, keys)


def test_blocks_that_v2_writes_after_their_store_are_seen(llama: Path, tmp_path: Path) -> None:
    """A comparison of bytes with vLLM's own cache detects them, as in ``test_kinds``. ``verify``
    cannot detect them, because it digests a block in the same hook, before V2 has written."""
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

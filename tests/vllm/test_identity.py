"""Real engines whose blocks have equal keys but different bytes must not read each other's
blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.tiny_model import make_llama
from tests.models import configs
from tests.models.families import RANDOM, write_model
from tests.vllm import swapped_files
from tests.vllm.engine import Engine
from tests.vllm.restored import HASH, config, loaded_tokens, prompts, settle

TOKENS = 8320
"""Beyond position 8,191, Llama 4 scales its queries if ``max_model_len`` is above 32,768."""


def test_llama4_with_another_max_model_len_reads_nothing(tmp_path: Path) -> None:
    changes = {
        "max_position_embeddings": 131072,
        # The scaled layer comes first, so that its output reaches the KV of the others.
        "layer_types": ["full_attention"] + ["chunked_attention"] * 3,
        "no_rope_layers": [0, 1, 1, 1],
    }
    model = write_model(tmp_path / "model", configs.LLAMA4 | changes)
    connector = config(tmp_path / "kv") | {"engine_id": "one set of weights"}
    options: dict[str, Any] = RANDOM | {
        "connector": connector,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_batched_tokens": 2080,
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    [prompt] = prompts(1, TOKENS)

    with Engine(model, log=tmp_path / "short", max_model_len=16384, **options) as engine:
        engine.generate_one(prompt, max_tokens=1)
        short = engine.kv_snapshot()
        settle(engine)

    with Engine(model, log=tmp_path / "long", max_model_len=65536, **options) as engine:
        assert "are not used, because model.max_model_len differs: 16384 stored, 65536 now" in (
            engine.log()
        )
        engine.generate_one(prompt, max_tokens=1)
        assert loaded_tokens(engine, "lmdb") == 0
        long = engine.kv_snapshot()
    assert short.keys() == long.keys()
    wrong = [key for key in short if short[key] != long[key]]
    assert wrong, "the blocks could have been read"


def test_a_folder_replaced_while_it_is_loaded_does_not_name_the_blocks(tmp_path: Path) -> None:
    """The files are those of the second model when the connector digests them, but the blocks are
    those of the first."""
    model, second = make_llama(tmp_path / "model", 1), make_llama(tmp_path / "second", 2)
    connector = config(tmp_path / "kv") | {"engine_id": "one name"}
    options: dict[str, Any] = HASH | {"connector": connector}
    [prompt] = prompts(1)

    swapping = {"worker_extension_cls": f"{swapped_files.__name__}.SwapsFiles"}
    variables = {swapped_files.OTHER: str(second)}
    with Engine(model, log=tmp_path / "one", env=variables, **options, **swapping) as engine:
        assert "it is not known which version" in engine.log()
        engine.generate_one(prompt, max_tokens=1)
        of_first = engine.kv_snapshot()
        settle(engine)
        engine.reset_prefix_cache()
        engine.generate_one(prompt, max_tokens=1)
        assert loaded_tokens(engine, "cpu") > 0

    with Engine(model, log=tmp_path / "two", **options) as engine:
        engine.generate_one(prompt, max_tokens=1)
        assert loaded_tokens(engine, "lmdb") == 0
        of_second = engine.kv_snapshot()
        settle(engine)
    assert of_first.keys() == of_second.keys()
    assert all(of_first[key] != of_second[key] for key in of_first)

    with Engine(model, log=tmp_path / "three", **options) as engine:
        engine.generate_one(prompt, max_tokens=1)
        assert loaded_tokens(engine, "lmdb") > 0
        assert engine.kv_snapshot() == of_second

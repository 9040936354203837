"""LoRA adapters that are replaced at their path, on real engines: KV is found by the content that
was loaded when it was computed, not by the files at the path when a request comes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest

from demo.tiny_model import LlamaShape, save_bfloat16
from tests.vllm.engine import Engine
from tests.vllm.probes import totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import HASH, config, loaded_tokens, prompts, see_planted_faults, settle

NAME = "adapter"
RANK = 8
HIT = 576
"""Number of prompt tokens that are in whole blocks."""


def make_adapter(folder: Path, seed: int) -> Path:
    """An adapter for every query, key and value projection, strong enough to change tokens."""
    shape, draw = LlamaShape(), np.random.default_rng(seed)
    sizes = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
    weights = {}
    for layer in range(shape.layers):
        for name, heads in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            rows = heads * shape.head_dim
            for part, size in (("A", (RANK, shape.hidden)), ("B", (rows, RANK))):
                values = draw.normal(0.0, 0.3, size).astype(np.float32)
                weights[f"{at}.lora_{part}.weight"] = values
    folder.mkdir()
    save_bfloat16(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def load(llm: Any, path: str, in_place: bool = False) -> None:
    """Load adapters as a server does, at its start and on request."""
    llm.llm_engine.add_lora(LoRARequest(NAME, 1, path, load_inplace=in_place))


Answer = tuple[list[int], float]
"""Tokens and their log-probability."""


def answer(llm: Any, path: str, prompt: Prompt) -> tuple[int, Answer]:
    """A greedy answer with the adapter, and the number of cached tokens of the prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    inputs = {"prompt_token_ids": prompt}
    [found] = llm.generate(
        [inputs], sampling, lora_request=LoRARequest(NAME, 1, path), use_tqdm=False
    )
    output = found.outputs[0]
    return found.num_cached_tokens or 0, (list(output.token_ids), output.cumulative_logprob)


def answers(engine: Engine, path: Path, prompt: Prompt) -> dict[int, Answer]:
    """Returns the answers for a fully computed prompt and for one with a hit in vLLM's own cache,
    by the length of the hit. An answer is compared with one whose hit had the same length: the same
    tokens are then computed in the same pieces, which is exact on every processor."""
    found = dict(engine.call(answer, str(path), prompt) for _ in range(2))
    assert found.keys() == {0, HIT}
    return found


def test_an_adapter_is_identified_by_what_was_loaded(llama: Path, tmp_path: Path) -> None:
    first, second = (make_adapter(tmp_path / f"v{seed}", seed) for seed in (1, 2))
    path = tmp_path / "adapter"
    options: dict[str, Any] = HASH | {
        "connector": config(tmp_path / "kv"),
        "enable_lora": True,
        "max_lora_rank": RANK,
    }
    [prompt] = prompts(1)

    def put(version: Path) -> None:
        """Replace the files at the path, as a deployment does."""
        link = tmp_path / "next"
        link.symlink_to(version)
        os.replace(link, path)

    def is_answered(engine: Engine, right: dict[int, Answer]) -> bool:
        cached, given = engine.call(answer, str(path), prompt)
        return bool(given == right[cached])

    put(first)
    with Engine(llama, log=tmp_path / "one", **options) as engine:
        engine.call(load, str(path))
        put(second)  # after the load, before the first request
        of_first = answers(engine, path, prompt)
        settle(engine)
        engine.reset_prefix_cache()
        assert is_answered(engine, of_first)
        assert loaded_tokens(engine, "cpu") == HIT
        settle(engine)

    with Engine(llama, log=tmp_path / "two", **options) as engine:
        engine.call(load, str(path))
        of_second = answers(engine, path, prompt)
        assert loaded_tokens(engine, "lmdb") == loaded_tokens(engine, "cpu") == 0
        assert all(of_second[hit] != of_first[hit] for hit in (0, HIT))
        settle(engine)

    put(first)
    with Engine(llama, log=tmp_path / "three", **options) as engine:
        engine.call(load, str(path))
        assert is_answered(engine, of_first)
        assert loaded_tokens(engine, "lmdb") == HIT
        failed = engine.call(totals)["load_failures"]
        see_planted_faults(engine, lambda: engine.call(answer, str(path), prompt))
        planted = engine.call(totals)["load_failures"] - failed

        put(second)  # and loaded again under the same name, which no hash can reveal
        engine.call(load, str(path), True)
        engine.reset_prefix_cache()
        assert engine.call(answer, str(path), prompt)[1] not in of_first.values()
        assert engine.call(totals)["load_failures"] == planted + 1
        assert "have changed since it was first loaded" in engine.log()
        engine.reset_prefix_cache()
        assert is_answered(engine, of_second)
        engine.reset_prefix_cache(connector=True)
        assert is_answered(engine, of_second)
        engine.reset_prefix_cache()
        before = loaded_tokens(engine, "cpu")
        assert is_answered(engine, of_second)
        loaded = loaded_tokens(engine, "cpu")
        assert loaded == before + HIT, (engine.call(totals), engine.log()[-4000:])

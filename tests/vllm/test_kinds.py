"""Every kind of KV cache that vLLM's CPU platform runs, stored and restored on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families import FAMILIES
from tests.vllm.engine import Engine, EngineError
from tests.vllm.kinds import Expected, Kind, show_stored_and_restored, show_verified
from tests.vllm.restored import config

TP2 = {"tensor_parallel_size": 2}

KINDS = {
    "llama_544": Kind("llama_544"),
    "llama_fp8_e4m3": Kind("llama_fp8_e4m3"),
    "llama_ngram": Kind("llama_ngram"),
    "llama_draft": Kind("llama_draft"),
    "mistral": Kind("mistral"),
    "mistral_chunks": Kind("mistral", chunk_blocks=3),
    "gemma3": Kind("gemma3"),
    "gemma3_chunks": Kind("gemma3", chunk_blocks=2),
    "gemma3_draft": Kind("gemma3_draft"),
    "gpt_oss": Kind("gpt_oss"),
    "gemma4": Kind("gemma4"),
    "llama4": Kind("llama4"),
    "qwen3_next": Kind("qwen3_next"),
    "qwen3_next_ngram": Kind("qwen3_next_ngram", goes_on=True),
    "qwen3_next_mtp": Kind("qwen3_next_mtp"),
    "falcon_h1": Kind("falcon_h1"),
    "nemotron_h": Kind("nemotron_h"),
    "granite_hybrid": Kind("granite_hybrid"),
    "lfm2": Kind("lfm2"),
    # 19 blocks: vLLM keeps the state after the last one, where no chunk of two blocks could end.
    "lfm2_chunks": Kind("lfm2", chunk_blocks=2, prompt_tokens=620),
    "deepseek_v2": Kind("deepseek_v2"),
    "deepseek_v3": Kind("deepseek_v3"),
    "deepseek_v3_ngram": Kind("deepseek_v3_ngram"),
    "deepseek_v3_mtp": Kind("deepseek_v3_mtp"),
    "llama_tp2": Kind("llama", changes=TP2),
    "deepseek_v2_tp2": Kind("deepseek_v2", changes=TP2),
    "qwen3_next_tp2": Kind("qwen3_next", changes=TP2),
}


ONE_OF_EACH = {
    "llama_fp8_e4m3": "pages of half the size",
    "llama_draft": "pages of two sizes in one group",
    "gemma3_chunks": "sliding windows, chunks of two blocks",
    "gemma4": "groups of two block sizes",
    "llama4": "chunked local attention",
    "qwen3_next_ngram": "states while drafts are accepted and rejected",
    "granite_hybrid": "Mamba-2 states",
    "lfm2": "short convolutions",
    "deepseek_v3_mtp": "latent attention, with a draft layer in the same group",
    "qwen3_next_tp2": "Gated DeltaNet states, on two ranks",
}
"""The kinds of KV cache that are different for kvtiers; the others are variants."""


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_of_each(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    show_verified(KINDS[name], tmp_path)


def skip_if_missing(name: str) -> None:
    if missing := FAMILIES[KINDS[name].family].missing():
        pytest.skip(missing)


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, tmp_path: Path) -> None:
    skip_if_missing(name)
    kind = KINDS[name]
    expected = Expected.record(kind, tmp_path / "model", tmp_path / "plain.log")
    show_stored_and_restored(kind, expected, tmp_path / "model", tmp_path)


@pytest.mark.thorough
def test_mla_as_the_platform_runs_it_by_default(tmp_path: Path) -> None:
    """vLLM has no prefix cache for it: the tiers provide the blocks that such a cache would have
    provided."""
    kind = KINDS["deepseek_v2"]
    expected = Expected.record(kind, tmp_path / "model", tmp_path / "plain.log")
    model, options = kind.make(tmp_path / "model")
    del options["env"]
    log = tmp_path / "restored.log"
    with Engine(model, log=log, connector=config(None), **options) as engine:
        cold, warm = (engine.generate_one(expected.prompts[0]) for _ in range(2))
        assert engine.cached_blocks() == {}
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == expected.warm[0].cached_tokens > 0
        assert cold.same_output(expected.cold[0])
        assert warm.same_output(expected.warm[0])


REFUSED = {
    "llama": ({"kv_cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype auto"),
    "lfm2": ({"enable_prefix_caching": False}, "--enable-prefix-caching --mamba-cache-mode align"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_model_is_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    changes, hint = REFUSED[name]
    model, options = Kind(name, changes).make(tmp_path / "model")
    with pytest.raises(EngineError, match="kvtiers cannot offload this model") as error:
        Engine(model, log=tmp_path / "log", connector=config(None), **options)
    assert f"To fix it: start vLLM with {hint}" in str(error.value)

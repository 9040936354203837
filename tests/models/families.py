"""Every model family that runs on vLLM's CPU platform, with the flags that vLLM needs for it.

    family = FAMILIES["gemma3"]
    model = family.make(folder)
    Engine(model, log=log, **family.kwargs(model))

``tests/vllm/test_families.py`` starts each of them. Adding a family is one entry here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.tiny_model import make_llama, write_tokenizer
from tests.models import configs
from tests.processor import has_avx512

LOAD_FORMAT = "unit_gain"


def write_model(folder: Path, config: configs.Config) -> Path:
    """Write config and tokenizer; the weights come from the load format ``unit_gain``."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder, config["max_position_embeddings"])
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@dataclass(frozen=True)
class Family:
    """One kind of model. ``groups`` are the KV cache groups that vLLM makes for it (kind, block
    size in tokens); ``prompt_tokens`` is long enough for a hit in its own prefix cache."""

    name: str
    make: Callable[[Path], Path]
    groups: tuple[tuple[str, int], ...]
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] | None = None
    """``speculative_config``; a model named ``draft`` is the folder ``draft`` in the model's."""
    prompt_tokens: int = 600
    hits: bool = True
    """True if vLLM's own prefix cache is on (vLLM turns it off for MLA on CPU)."""
    needs_avx512: bool = False
    """True if vLLM starts this model only on a CPU with AVX-512."""
    notes: str = ""

    def missing(self) -> str | None:
        """The reason why this machine cannot run the family, or None."""
        if not self.needs_avx512 or has_avx512():
            return None
        return "needs a processor with AVX-512"

    def kwargs(self, model: Path) -> dict[str, Any]:
        """Keyword arguments for the engine, in addition to those of every test engine."""
        kwargs = dict(self.engine_kwargs)
        if self.speculative is not None:
            speculative = dict(self.speculative)
            if "model" in speculative:
                speculative["model"] = str(model / speculative["model"])
            kwargs["speculative_config"] = speculative
        return kwargs


def _config_only(config: configs.Config) -> Callable[[Path], Path]:
    return lambda folder: write_model(folder, config)


def _with_draft(make: Callable[[Path], Path], draft: configs.Config) -> Callable[[Path], Path]:
    def make_both(folder: Path) -> Path:
        make(folder)
        write_model(folder / "draft", draft)
        return folder

    return make_both


def _states(groups: int, block_size: int) -> tuple[tuple[str, int], ...]:
    return (("MambaSpec", block_size),) * groups


RANDOM = {"load_format": LOAD_FORMAT}
# By default vLLM keeps these states in bfloat16, or in float32 if the processor has AVX-512 for
# bfloat16; blocks are twice as long then.
GDN = RANDOM | {"mamba_ssm_cache_dtype": "float32"}
MAMBA2 = RANDOM | {"block_size": 128, "max_num_batched_tokens": 128}
# vLLM turns chunked prefill off for MLA on CPU, so a prompt must fit into one step. On CPUs with
# AMX vLLM would use other kernels, with blocks of any size and with prefix caching.
ONE_MLA = {"attention_backend": "CPU_MLA"}
MLA = (
    RANDOM
    | ONE_MLA
    | {
        "block_size": 16,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_batched_tokens": 2048,
    }
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
DRAFT = {"model": "draft", "method": "draft_model", "num_speculative_tokens": 2}

FULL = ("FullAttentionSpec", 32)
SLIDING = ("SlidingWindowSpec", 32)
LATENT = ("MLAAttentionSpec", 16)
CHUNKED = ("ChunkedLocalAttentionSpec", 32)

_ALL = (
    Family("llama", make_llama, (FULL,)),
    Family(
        "llama_544",
        make_llama,
        (("FullAttentionSpec", 544),),
        {"block_size": 544, "kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 2048},
        prompt_tokens=1300,
        notes="a kernel block, too: CPU attention takes every multiple of 32 as it is",
    ),
    Family(
        "llama_fp8_e4m3", make_llama, (FULL,), {"kv_cache_dtype": "fp8_e4m3"}, needs_avx512=True
    ),
    Family(
        "llama_fp8_e5m2", make_llama, (FULL,), {"kv_cache_dtype": "fp8_e5m2"}, needs_avx512=True
    ),
    Family("llama_ngram", make_llama, (FULL,), speculative=NGRAM),
    Family(
        "llama_draft",
        _with_draft(make_llama, configs.DRAFT_WIDE),
        (FULL,),
        RANDOM,
        speculative=DRAFT,
        notes="pages of 8,192 and 32,768 bytes in one group; only the workers' spec tells",
    ),
    Family("qwen3", _config_only(configs.QWEN3), (FULL,), RANDOM),
    Family("mistral", _config_only(configs.MISTRAL), (SLIDING,), RANDOM),
    Family("gemma3", _config_only(configs.GEMMA3), (SLIDING, SLIDING, FULL), RANDOM),
    Family(
        "gemma3_draft",
        _with_draft(_config_only(configs.GEMMA3), configs.DRAFT_GEMMA3),
        (SLIDING, FULL),
        RANDOM,
        speculative=DRAFT,
    ),
    Family("gpt_oss", _config_only(configs.GPT_OSS), (SLIDING, FULL), RANDOM),
    Family(
        "gemma4",
        _config_only(configs.GEMMA4),
        (("SlidingWindowSpec", 64), ("SlidingWindowSpec", 64), FULL),
        RANDOM,
        notes="head sizes differ, so block sizes differ; hits end at multiples of 64",
    ),
    Family("llama4", _config_only(configs.LLAMA4), (CHUNKED, CHUNKED, CHUNKED, FULL), RANDOM),
    Family(
        "qwen3_next",
        _config_only(configs.QWEN3_NEXT),
        (*_states(3, 544), ("FullAttentionSpec", 544)),
        GDN,
        prompt_tokens=1600,
        notes="hash block and kernel block 544",
    ),
    Family(
        "qwen3_next_ngram",
        _config_only(configs.QWEN3_NEXT_SMALL),
        (*_states(3, 288), ("FullAttentionSpec", 288)),
        GDN,
        speculative=NGRAM | {"prompt_lookup_min": 1, "num_speculative_tokens": 1},
        prompt_tokens=861,
        notes="a state for each draft makes the blocks larger; the answer crosses the end of one",
    ),
    Family(
        "qwen3_next_mtp",
        _config_only(configs.QWEN3_NEXT_SMALL),
        (*_states(2, 288), ("FullAttentionSpec", 288)),
        GDN,
        speculative={"method": "mtp", "num_speculative_tokens": 1},
        prompt_tokens=1149,
        notes="the MTP layer is in the full group; hits end a block earlier",
    ),
    Family(
        "falcon_h1",
        _config_only(configs.FALCON_H1),
        (("FullAttentionSpec", 128), ("MambaSpec", 128)),
        MAMBA2,
    ),
    Family(
        "nemotron_h",
        _config_only(configs.NEMOTRON_H),
        (*_states(2, 128), ("FullAttentionSpec", 128)),
        MAMBA2,
    ),
    Family(
        "granite_hybrid",
        _config_only(configs.GRANITE_HYBRID),
        (*_states(3, 128), ("FullAttentionSpec", 128)),
        MAMBA2,
    ),
    Family("lfm2", _config_only(configs.LFM2), (*_states(3, 32), FULL), RANDOM),
    Family("deepseek_v2", _config_only(configs.DEEPSEEK_V2), (LATENT,), MLA, hits=False),
    Family("deepseek_v3", _config_only(configs.DEEPSEEK_V3), (LATENT,), MLA, hits=False),
    Family(
        "deepseek_v3_ngram",
        _config_only(configs.DEEPSEEK_V3),
        (LATENT,),
        MLA,
        hits=False,
        speculative=NGRAM,
    ),
    Family(
        "deepseek_v3_mtp",
        _config_only(configs.DEEPSEEK_V3),
        (LATENT,),
        MLA,
        hits=False,
        speculative={"method": "mtp", "num_speculative_tokens": 1} | ONE_MLA,
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

"""Models for the scheduler oracle: vLLM's own specs per layer, grouped and placed by vLLM.

These include models that vLLM's CPU platform cannot run, beside a few that it can: Mamba-1, MLA
with GQA draft layers, DeepSeek-V4's compressed and packed caches, and tensors split into kernel
blocks. A block has 4 to 8 tokens, so that short requests cross many boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.offload.connector.kv_cache_configs import chunked, full, mamba, mla, sliding, sliding_mla


@dataclass(frozen=True)
class OracleModel:
    """``layers`` by name, in order of registration. ``drafts`` is the number of tokens drafted per
    step. ``draft_head`` means that the layers named ``draft`` produce them; layer number ``n`` of
    these looks ``n + 1`` tokens ahead, so that its last slots contain guesses. ``kernel_blocks`` is
    the number of kernel blocks per block, as Model Runner V2 presents them; ``blocks`` is the size
    of vLLM's cache, too small for the requests that run together. With a ``match_unit`` smaller
    than a block, vLLM's own hits end inside blocks, which it then copies on write."""

    layers: Callable[[], dict[str, KVCacheSpec]]
    layout: str = "LBHNC"
    drafts: int = 0
    draft_head: bool = False
    kernel_blocks: int = 1
    block_tokens: int = 4
    blocks: int = 60
    match_unit: int | None = None


def _layers(**by_prefix: tuple[int, Callable[[], KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    return {
        f"{prefix}.{number}": make()
        for prefix, (count, make) in by_prefix.items()
        for number in range(count)
    }


def _state(block: int, page: int = 0, kind: str = "mamba1", drafts: int = 0) -> KVCacheSpec:
    more = {"page_size_padded": page or None, "num_speculative_blocks": drafts}
    return mamba(block, mamba_type=kind, **more)


MODELS: dict[str, OracleModel] = {
    "full": OracleModel(lambda: _layers(f=(2, lambda: full(4)))),
    "full_ngram": OracleModel(lambda: _layers(f=(2, lambda: full(4))), drafts=3),
    "full_fp8": OracleModel(lambda: _layers(f=(2, lambda: full(4, dtype=torch.float8_e4m3fn)))),
    "runner_v2_kernel_blocks": OracleModel(
        lambda: _layers(f=(2, lambda: full(8))), kernel_blocks=2, block_tokens=8
    ),
    "sliding": OracleModel(lambda: _layers(s=(2, lambda: sliding(4, 10)))),
    "sliding_full": OracleModel(
        lambda: _layers(s=(4, lambda: sliding(4, 10)), f=(2, lambda: full(4))), blocks=90
    ),
    "sliding_full_ngram": OracleModel(
        lambda: _layers(s=(2, lambda: sliding(4, 10)), f=(2, lambda: full(4))), drafts=2
    ),
    "two_block_sizes": OracleModel(
        lambda: _layers(s=(2, lambda: sliding(4, 10)), f=(2, lambda: full(4, num_kv_heads=4)))
    ),
    "chunked_full": OracleModel(
        lambda: _layers(c=(2, lambda: chunked(4, 16)), f=(2, lambda: full(4)))
    ),
    "mamba1": OracleModel(lambda: _layers(m=(2, lambda: _state(4)))),
    "mamba1_full": OracleModel(
        lambda: _layers(m=(2, lambda: _state(4, full(4).page_size_bytes)), f=(2, lambda: full(4)))
    ),
    "mamba_full_ngram": OracleModel(
        lambda: _layers(
            m=(2, lambda: _state(4, full(4).page_size_bytes, drafts=2)), f=(2, lambda: full(4))
        ),
        drafts=2,
        blocks=90,
    ),
    "mamba_full_mtp": OracleModel(
        lambda: _layers(
            m=(2, lambda: _state(4, full(4).page_size_bytes, drafts=1)),
            f=(1, lambda: full(4)),
            draft=(1, lambda: full(4)),
        ),
        drafts=1,
        draft_head=True,
        blocks=90,
    ),
    "mamba1_full_match_unit": OracleModel(
        lambda: _layers(m=(2, lambda: _state(8, full(8).page_size_bytes)), f=(2, lambda: full(8))),
        block_tokens=8,
        match_unit=4,
        blocks=30,
    ),
    "mla": OracleModel(lambda: _layers(l=(3, lambda: mla(4)))),
    "mla_gqa_draft": OracleModel(
        lambda: _layers(l=(3, lambda: mla(4)), draft=(2, lambda: full(4))),
        layout="BLHNC",
        drafts=2,
        draft_head=True,
    ),
    "full_mtp": OracleModel(
        lambda: _layers(f=(2, lambda: full(4)), draft=(1, lambda: full(4))),
        drafts=1,
        draft_head=True,
    ),
    "deepseek_v4_packed": OracleModel(
        lambda: _layers(
            w=(2, lambda: sliding_mla(4, 10)),
            c=(2, lambda: mla(8, tokens_per_state=4)),
            i=(2, lambda: mla(8, head_size=12)),
        ),
        layout="BLHNC",
    ),
}


def in_short_steps(side: Any, seed: int) -> Any:
    """Make the planner; with every other seed, its lookups, loads, stores and answers take several
    steps."""
    planner = side.planner
    if seed % 2:
        budget = planner.budget
        budget.units = budget.left = 4
        budget.loads.chunks = budget.loads.left = 2
        budget.lookups.chunks, budget.lookups.chunks_min = 3, 1
        budget.lookups.renew()
    return planner

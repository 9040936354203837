"""KV cache configurations made from vLLM's own spec classes, without a model.

Only the fields of ``VllmConfig`` that ``vllm_layout`` reads are set.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


def full(block: int, **more) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, **{"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, **more}
    )


def mla(block: int, **more) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block, **{"num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16, **more}
    )


def sliding(block: int, window: int, **more) -> SlidingWindowSpec:
    values = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, "dcp_sharded": False}
    return SlidingWindowSpec(block_size=block, sliding_window=window, **{**values, **more})


def sliding_mla(block: int, window: int, **more) -> SlidingWindowMLASpec:
    values = {"num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16, "dcp_sharded": False}
    return SlidingWindowMLASpec(block_size=block, sliding_window=window, **{**values, **more})


def chunked(block: int, span: int, **more) -> ChunkedLocalAttentionSpec:
    values = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, "dcp_sharded": False}
    return ChunkedLocalAttentionSpec(
        block_size=block, attention_chunk_size=span, **{**values, **more}
    )


def mamba(block: int, mode: str = "align", **more) -> MambaSpec:
    values = {"shapes": ((4, 6), (2, 3)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(block_size=block, mamba_cache_mode=mode, **{**values, **more})


def groups_of(*specs: KVCacheSpec, drafts: set[int] = frozenset()) -> list[KVCacheGroupSpec]:
    return [
        KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in drafts)
        for i, spec in enumerate(specs)
    ]


def config_of(
    groups: list[KVCacheGroupSpec], hash_tokens: int | None = None, num_blocks: int = 64
) -> KVCacheConfig:
    cacheable = [g.kv_cache_spec.block_size for g in groups if g.kv_cache_spec.prefix_cacheable]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=hash_tokens or math.gcd(*cacheable),
    )


def vllm_config(**more) -> SimpleNamespace:
    """Accepts ``dcp``, ``pcp``, ``max_model_len``, ``prefix_caching`` and ``draft_head``."""
    speculative = None
    if more.get("draft_head"):
        speculative = SimpleNamespace(use_eagle_block_drop=lambda: True)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=more.get("dcp", 1),
            prefill_context_parallel_size=more.get("pcp", 1),
            pipeline_parallel_size=more.get("pp", 1),
        ),
        model_config=SimpleNamespace(max_model_len=more.get("max_model_len", 100_000)),
        cache_config=SimpleNamespace(enable_prefix_caching=more.get("prefix_caching", True)),
        speculative_config=speculative,
    )

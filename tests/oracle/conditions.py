"""The conditions of the oracle's worlds, and vLLM's configuration for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from offload.connector.compat.doctor import make_kv_cache_config
from tests.models.configs import QWEN3
from tests.models.families import write_model
from tests.oracle.models import OracleModel
from tests.patience import PATIENCE_S
from tests.vllm.engine import transfer_config

HASH = "sha256_cbor"
MAX_TOKENS = 152
SLOT_BYTES = 4096


@dataclass(frozen=True)
class Conditions:
    """The conditions of a world. ``slots`` of the CPU tier; ``tier``: whether there is a lower
    tier; ``tiers``: options of each lower tier, instead of those of one large tier; ``fault_rate``
    of their reads; ``late``: the maximum number of turns that copies get per
    step; ``runner``: the simulated model runner; ``scheduling``: vLLM's policy; ``seqs``: the
    requests that vLLM runs at a time; ``long_prefill``: the tokens of a prompt that it computes in
    a step if others run (0: no limit); ``loras``: the LoRA adapters in a step; ``vllm_errs``:
    whether vLLM continues requests from wrong KV as it really does; ``cpu``: more options of the
    CPU tier; ``options``: more of the configuration; ``features``: see ``tests.oracle.mixed``."""

    slots: int = 24
    tier: bool = True
    fault_rate: float = 0.0
    late: int = 6
    asynchronous: bool = False
    batched_tokens: int = 32
    chunk_blocks: int = 1
    runner: int = 1
    scheduling: str = "fcfs"
    seqs: int = 4
    long_prefill: int = 0
    loras: int = 0
    vllm_errs: bool = False
    cpu: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[Mapping[str, Any], ...] = ({"capacity": "1MiB"},)
    options: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()


def make_config(model: OracleModel, conditions: Conditions, folder: Path) -> tuple[VllmConfig, Any]:
    """vLLM's own configuration and KV cache configuration for the model's layers."""
    tiers = [
        {"type": "file", "path": str(folder / f"kv{number}"), "reserve": 0, **options}
        for number, options in enumerate(conditions.tiers)
    ]
    extra = {
        "cpu": {"capacity": conditions.slots * SLOT_BYTES, **conditions.cpu},
        "tiers": tiers if conditions.tier else [],
        "chunk_blocks": conditions.chunk_blocks,
        **dict.fromkeys(("load_timeout_s", "tier_timeout_s"), PATIENCE_S),
    } | dict(conditions.options)
    speculative = None
    if model.drafts:
        count = {"num_speculative_tokens": model.drafts, "prompt_lookup_max": 2}
        speculative = {"method": "ngram"} | count
    config = EngineArgs(
        model=str(write_model(folder / "model", QWEN3)),
        kv_transfer_config=transfer_config(extra),
        speculative_config=speculative,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=conditions.batched_tokens,
        max_num_seqs=conditions.seqs,
        long_prefill_token_threshold=conditions.long_prefill,
        enable_lora=conditions.loras > 0,
        max_loras=max(1, conditions.loras),
        scheduling_policy=conditions.scheduling,
        enable_prefix_caching=True,
        prefix_caching_hash_algo=HASH,
        # two steps in flight keep more blocks of a window
        num_gpu_blocks_override=model.blocks * 3 // 2 if conditions.asynchronous else model.blocks,
        enforce_eager=True,
    ).create_engine_config()
    if model.draft_head:
        config.speculative_config.method = "mtp"
    # On the CPU platform, vLLM turns asynchronous scheduling off, and it refuses it with n-grams.
    # The scheduler treats all drafts alike.
    config.scheduler_config.async_scheduling = conditions.asynchronous
    cache = config.cache_config
    cache.block_size, cache.mamba_cache_mode = model.block_tokens, "align"
    cache.kv_cache_layout = model.layout
    cache.prefix_match_unit = model.match_unit
    kv_cache_config = make_kv_cache_config(config, model.layers(), 1 << 30)
    cache.num_gpu_blocks = kv_cache_config.num_blocks
    return config, kv_cache_config

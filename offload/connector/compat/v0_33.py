"""vLLM 0.33: KV cache planning is in a separate module and creates groups first."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.config.cache import get_kv_cache_dtype_handler
from vllm.v1.core.kv_cache_planning import (
    get_global_kv_cache_groups,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def make_kv_cache_config(
    config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory: int
) -> KVCacheConfig:
    """See ``v0_32``."""
    layers = [dict(specs)]
    groups = get_global_kv_cache_groups(config, layers)
    config.adjust_dcp_kv_cache_interleave_size(groups)
    return get_kv_cache_configs(config, layers, [memory], groups)[0]


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered; ``None`` for the
    dtypes of vLLM itself."""
    handler: object | None = get_kv_cache_dtype_handler(dtype)
    return handler


def follow_sleep() -> None:
    """See ``v0_32``. Workers of this version call the hooks themselves."""

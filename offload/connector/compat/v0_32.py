"""vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from offload.connector.compat.worker_sleep import follow_sleep

__all__ = ["cache_dtype_handler", "follow_sleep", "make_kv_cache_config"]


def make_kv_cache_config(
    config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory: int
) -> KVCacheConfig:
    """Plan the KV cache of one worker with layers of these specs and ``memory`` bytes.

    Raises whatever vLLM raises if they do not fit.
    """
    return get_kv_cache_configs(config, [dict(specs)], [memory])[0]


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered. vLLM 0.32 has only its
    built-in dtypes."""
    return None

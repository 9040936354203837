"""vLLM 0.33: platform plugins can register KV cache dtypes; workers have hooks for sleep mode."""

from __future__ import annotations

from vllm.config.cache import get_kv_cache_dtype_handler

COUNTS_DRAFTS_AFTER_STOP = False
"""See ``v0_32``."""


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered; ``None`` for the
    dtypes of vLLM itself."""
    handler: object | None = get_kv_cache_dtype_handler(dtype)
    return handler


def follow_sleep() -> None:
    """See ``v0_32``. Workers of this version call the hooks themselves."""

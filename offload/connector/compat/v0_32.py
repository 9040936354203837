"""vLLM 0.32."""

from __future__ import annotations

from offload.connector.compat.worker_sleep import follow_sleep

__all__ = ["cache_dtype_handler", "follow_sleep"]


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered. vLLM 0.32 has only its
    built-in dtypes."""
    return None

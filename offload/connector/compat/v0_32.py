"""vLLM 0.32."""

from __future__ import annotations

from offload.connector.compat.worker_sleep import follow_sleep

__all__ = ["COUNTS_DRAFTS_AFTER_STOP", "cache_dtype_handler", "follow_sleep"]

COUNTS_DRAFTS_AFTER_STOP = True
"""Whether accepted drafts that come after a stop count as computed, under synchronous
scheduling."""


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered. vLLM 0.32 has only its
    built-in dtypes."""
    return None

"""KV-cache offloading for vLLM: what to keep, where to keep it, and how to restore it.

A vLLM server names ``offload.connector`` in its configuration and imports nothing else. Programs
without vLLM use ``OffloadManager``. The names in ``__all__`` here, in ``policies`` and in ``tiers``
are public, and so is every module that ``docs/reference/api.md`` names; everything else is private
and may change at any time.

``import offload`` imports neither torch nor vllm: names that need them are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload.errors import (
    ConfigError,
    InvariantError,
    LayoutError,
    ManagerClosedError,
    OffloadError,
    Problem,
    TierUnavailableError,
)

if TYPE_CHECKING:
    from offload.config.schema import OffloadConfig, parse_config
    from offload.layout.kv_cache_config import KvCacheConfig, SimpleConfig, SimpleGroup, SimpleSpec
    from offload.manager import OffloadManager

__all__ = [
    "ConfigError",
    "InvariantError",
    "KvCacheConfig",
    "LayoutError",
    "ManagerClosedError",
    "OffloadConfig",
    "OffloadError",
    "OffloadManager",
    "Problem",
    "SimpleConfig",
    "SimpleGroup",
    "SimpleSpec",
    "TierUnavailableError",
    "__version__",
    "parse_config",
]

__version__ = "0.1.0"
"""The only place that states the version; ``pyproject.toml`` reads it from here."""

_LAZY = {
    "KvCacheConfig": "offload.layout.kv_cache_config",
    "OffloadConfig": "offload.config.schema",
    "OffloadManager": "offload.manager",
    "SimpleConfig": "offload.layout.kv_cache_config",
    "SimpleGroup": "offload.layout.kv_cache_config",
    "SimpleSpec": "offload.layout.kv_cache_config",
    "parse_config": "offload.config.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

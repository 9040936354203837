"""KV-cache offloading for vLLM: what to keep, where to keep it, and how to restore it.

A vLLM server names ``offload.connector`` in its configuration and imports nothing else. Programs
without vLLM use ``OffloadManager``. ``docs/reference/api.md`` lists all public names and import
paths, including those in ``__all__``; everything else is private and may change at any time.

``import offload`` imports neither torch nor vllm: names that need them are imported on first use.

Owns the list of public names; other packages define what they name.

Must not know torch or vLLM until a name needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
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


def _check_other_packages() -> None:
    """Raise ``ImportError`` if another package named ``policies`` or ``tiers`` hides ours."""
    here = Path(__file__).resolve().parents[1]
    for name in ("policies", "tiers"):
        spec = importlib.util.find_spec(name)
        found = list((spec and spec.submodule_search_locations) or ())
        if here / name not in [Path(folder).resolve() for folder in found]:
            where = ", ".join(found) or (spec and spec.origin) or "nowhere"
            raise ImportError(
                f"kvtiers: Python imports the package {name} from {where}, not kvtiers' own from "
                f"{here / name}. Rename the other package, remove its folder from PYTHONPATH, or "
                "start Python in another folder"
            )


_check_other_packages()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

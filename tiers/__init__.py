"""Tiers below the GPU: media that store KV chunks, and engines that copy chunks to and from them.

``docs/reference/api.md`` lists all public names and import paths, including those in ``__all__``;
everything else is private and may change at any time. The tiers themselves are imported on first
use, because they need LMDB, Mooncake and threads.

Owns the media below the GPU, and the copies between them and the GPU.

Must not know requests, policies or vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiers.base import (
    ReadOutcome,
    SharedTier,
    Tier,
    TierClosedError,
    TierError,
    TierInfo,
    TierIoError,
    WriteOutcome,
)

if TYPE_CHECKING:
    from tiers.files.shared_tier import SharedFileTier
    from tiers.files.tier import FileTier
    from tiers.lmdb.options import LmdbOptions
    from tiers.lmdb.shared.tier import SharedLmdbTier
    from tiers.lmdb.tier import LmdbTier
    from tiers.mooncake.client import MooncakeSettings
    from tiers.mooncake.tier import MooncakeTier

__all__ = [
    "FileTier",
    "LmdbOptions",
    "LmdbTier",
    "MooncakeSettings",
    "MooncakeTier",
    "ReadOutcome",
    "SharedFileTier",
    "SharedLmdbTier",
    "SharedTier",
    "Tier",
    "TierClosedError",
    "TierError",
    "TierInfo",
    "TierIoError",
    "WriteOutcome",
]

_LAZY = {
    "FileTier": "tiers.files.tier",
    "LmdbOptions": "tiers.lmdb.options",
    "LmdbTier": "tiers.lmdb.tier",
    "MooncakeSettings": "tiers.mooncake.client",
    "MooncakeTier": "tiers.mooncake.tier",
    "SharedFileTier": "tiers.files.shared_tier",
    "SharedLmdbTier": "tiers.lmdb.shared.tier",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

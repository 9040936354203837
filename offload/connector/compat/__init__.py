"""Owns the differences between the supported versions of vLLM.

Must not know requests, blocks or tiers.

Names whose definition depends on the version are imported from this package or, if no server needs
them, from `offload.connector.compat.doctor`. There is one module per range of versions, with the
same names in each; the installed vLLM's version selects one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.version import __version_tuple__

if TYPE_CHECKING or __version_tuple__[:2] < (0, 33):
    from offload.connector.compat.v0_32 import (
        COUNTS_DRAFTS_AFTER_STOP,
        cache_dtype_handler,
        follow_sleep,
    )
else:
    from offload.connector.compat.v0_33 import (
        COUNTS_DRAFTS_AFTER_STOP,
        cache_dtype_handler,
        follow_sleep,
    )

__all__ = ["COUNTS_DRAFTS_AFTER_STOP", "cache_dtype_handler", "follow_sleep"]

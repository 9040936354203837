"""Owns the differences between versions of vLLM that matter only to ``kvtiers doctor``.

Must not know requests, blocks or tiers.

No server imports it, so that a server can run on a version of vLLM that lacks these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.version import __version_tuple__

if TYPE_CHECKING or __version_tuple__[:2] < (0, 33):
    from offload.connector.compat.doctor.v0_32 import make_arg_parser, make_kv_cache_config
else:
    from offload.connector.compat.doctor.v0_33 import make_arg_parser, make_kv_cache_config

__all__ = ["make_arg_parser", "make_kv_cache_config"]

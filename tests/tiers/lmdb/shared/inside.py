"""Gives access to what no public call of a shared LMDB tier shows: its index and LMDB's readers.

LMDB refuses to open an index twice in one process, so the tier's own object is the only access.
"""

from __future__ import annotations

from tiers.lmdb.shared.index import SharedIndex
from tiers.lmdb.shared.tier import SharedLmdbTier


def index_of(tier: SharedLmdbTier) -> SharedIndex:
    """The index of an open tier."""
    assert tier._files is not None
    return tier._files.index

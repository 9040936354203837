"""Chunks and groups as the planner sees them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import EntryInfo


@dataclass(frozen=True, slots=True)
class Wanted:
    """One chunk that a request needs: its key, and the GPU blocks to fill (below 0: skip)."""

    key: bytes
    group: int
    blocks: tuple[int, ...]
    depth_tokens: int


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What the planner knows of a group: restore rule, tokens of a chunk, and what a chunk
    takes in each tier (``footprints[t]``, bytes of lower tier ``t``)."""

    kind: str
    chunk_tokens: int
    footprints: tuple[int, ...]

    def entry(self, depth_tokens: int, size: int, group: int) -> EntryInfo:
        """What policies are told of a chunk of this group that takes ``size`` of a tier."""
        return EntryInfo(group, self.kind, depth_tokens, size)

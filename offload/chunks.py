"""Chunks and groups as the planner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

from offload.controls import NO_CONTROLS, Controls
from offload.entries import Entries
from offload.hints import NO_HINTS, RequestHints
from policies import hints as names


@dataclass(frozen=True, slots=True)
class Origin:
    """The request that a chunk comes from: a digest of the tenant's cache salt and hints, which
    policies may know, and controls, which the planner obeys."""

    salt: bytes = b""
    hints: RequestHints = NO_HINTS
    controls: Controls = NO_CONTROLS

    @property
    def priority(self) -> str:
        """How much the client cares."""
        found: str = self.hints.stored.get(names.PRIORITY, names.NORMAL)
        return found


UNKNOWN = Origin()


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one group that a request needs, in prefix order and by columns, because a long
    prompt has thousands of them: their keys; the GPU blocks of all, one after the other and as many
    of each (below 0: skip); and where each ends in the prompt (tokens)."""

    keys: Sequence[bytes]
    group: int
    blocks: Sequence[int]
    depths: Sequence[int]
    origin: Origin = UNKNOWN

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        """GPU blocks of a chunk."""
        return len(self.blocks) // len(self.keys) if self.keys else 1

    def part(self, first: int, end: int) -> Run:
        """Chunks ``[first, end)`` of these."""
        width = self.width
        return Run(
            self.keys[first:end],
            self.group,
            self.blocks[first * width : end * width],
            self.depths[first:end],
            self.origin,
        )

    def chosen(self, flags: Sequence[object]) -> Run:
        """Those with a true flag."""
        if all(flags):
            return self
        blocks = self.blocks
        if (width := self.width) == 1:
            chosen = list(compress(blocks, flags))
        else:
            rows = compress(zip(*[iter(blocks)] * width, strict=True), flags)
            chosen = list(chain.from_iterable(rows))
        keys = list(compress(self.keys, flags))
        return Run(keys, self.group, chosen, list(compress(self.depths, flags)), self.origin)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What the planner knows of a group: restore rule, tokens of a chunk, and what a chunk
    takes in each tier (``footprints[t]``, bytes of lower tier ``t``)."""

    kind: str
    chunk_tokens: int
    footprints: tuple[int, ...]

    def entries(self, run: Run, size: int) -> Entries:
        """What policies are told of chunks of this group that take ``size`` of a tier each."""
        return Entries(self, run.group, run.depths, run.origin, size)

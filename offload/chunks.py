"""Chunks and groups as the planner sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

from offload.controls import NO_CONTROLS, Controls
from offload.hints import NO_HINTS, RequestHints
from offload.layout import FULL
from policies import hints as names
from policies.base import EntryInfo

PAIR_TOKENS = 30_000.0
"""At about this depth a token costs twice of what the first one costs, because it attends to all
before it: 2 FLOPs per parameter against 4 x layers x width per earlier token, with the sizes of a
dense model of 8 billion parameters. A policy only compares costs."""


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


class Wanted(NamedTuple):
    """One chunk that a request needs: its key, and the GPU blocks to fill (below 0: skip).

    A tuple, because a long prompt has thousands of them.
    """

    key: bytes
    group: int
    blocks: tuple[int, ...]
    depth_tokens: int
    origin: Origin = UNKNOWN


# Without the Python function that names fields.
_wanted = partial(tuple.__new__, Wanted)
_entry = partial(tuple.__new__, EntryInfo)


def wanted_chunks(
    keys: Sequence[bytes],
    group: int,
    blocks: Iterable[tuple[int, ...]],
    depths: Iterable[int],
    origin: Origin,
) -> list[Wanted]:
    """Many chunks of one group at once; ``keys``, ``blocks`` and ``depths`` belong together."""
    count = len(keys)
    columns = keys, repeat(group, count), blocks, depths, repeat(origin, count)
    return list(map(_wanted, zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """What the planner knows of a group: restore rule, tokens of a chunk, and what a chunk
    takes in each tier (``footprints[t]``, bytes of lower tier ``t``)."""

    kind: str
    chunk_tokens: int
    footprints: tuple[int, ...]

    def entry(self, chunk: Wanted, size: int) -> EntryInfo:
        """What policies are told of a chunk of this group that takes ``size`` of a tier. The cost
        of computing it again is in units of a prompt's first token."""
        depth, origin = chunk.depth_tokens, chunk.origin
        cost = float(self.chunk_tokens)
        if self.kind == FULL:  # the others look back at a window, or at a state
            cost *= 1.0 + max(0.0, depth - self.chunk_tokens / 2) / PAIR_TOKENS
        hints = origin.hints.of_chunk(depth)
        return EntryInfo(chunk.group, self.kind, depth, size, cost, origin.salt, hints)

    def entries(self, chunks: Sequence[Wanted], size: int) -> list[EntryInfo]:
        """``entry`` of chunks of one request, all at once."""
        if not chunks or chunks[0].origin.hints.pinned_tokens:
            return [self.entry(chunk, size) for chunk in chunks]
        _, group, _, _, origin = chunks[0]
        cost = float(self.chunk_tokens)
        slope = cost / PAIR_TOKENS if self.kind == FULL else 0.0
        begin = self.chunk_tokens / 2
        depths = [chunk.depth_tokens for chunk in chunks]
        costs = [cost + slope * (depth - begin if depth > begin else 0.0) for depth in depths]
        count = len(chunks)
        constant = (repeat(value, count) for value in (origin.salt, origin.hints.stored))
        kinds, sizes = repeat(self.kind, count), repeat(size, count)
        columns = repeat(group, count), kinds, depths, sizes, costs, *constant
        return list(map(_entry, zip(*columns, strict=True)))

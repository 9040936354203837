"""Chunks and groups as the planner sees them, and the facts about chunks that policies get, in
columns.

A long prompt has thousands of chunks and most policies never read these facts, so they are made on
first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter
from typing import Any, overload

import numpy as np

from offload.index.request_options import NO_CONTROLS, NO_HINTS, Controls, RequestHints
from offload.layout.groups import FULL
from policies import hints as names
from policies.base import EntryInfo


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The request that a chunk comes from.

    Policies may know the digest of the tenant's cache salt, and the hints. The planner obeys the
    controls.
    """

    salt: bytes = b""
    hints: RequestHints = NO_HINTS
    controls: Controls = NO_CONTROLS

    @property
    def priority(self) -> str:
        """The client's priority."""
        found: str = self.hints.stored.get(names.PRIORITY, names.NORMAL)
        return found


UNKNOWN = RequestOrigin()


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of one group that a request needs, in prefix order and as columns.

    A long prompt has thousands of them. The columns are the keys, the GPU blocks of all chunks (the
    same number for each; negative ids are skipped), and the end of each chunk in the prompt (in
    tokens).
    """

    keys: Sequence[bytes]
    group: int
    blocks: Sequence[int]
    depths: Sequence[int]
    origin: RequestOrigin = UNKNOWN

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def width(self) -> int:
        """The GPU blocks of a chunk."""
        return len(self.blocks) // len(self.keys) if self.keys else 1

    def part(self, first: int, end: int) -> ChunkBatch:
        """The chunks ``[first, end)`` of this batch."""
        if first == 0 and end >= len(self):
            return self
        width = self.width
        return ChunkBatch(
            self.keys[first:end],
            self.group,
            self.blocks[first * width : end * width],
            self.depths[first:end],
            self.origin,
        )

    def chosen(self, flags: Sequence[object]) -> ChunkBatch:
        """The chunks whose flag is true."""
        if all(flags):
            return self
        blocks = self.blocks
        if (width := self.width) == 1:
            chosen = list(compress(blocks, flags))
        else:
            rows = compress(zip(*[iter(blocks)] * width, strict=True), flags)
            chosen = list(chain.from_iterable(rows))
        keys = list(compress(self.keys, flags))
        return ChunkBatch(keys, self.group, chosen, list(compress(self.depths, flags)), self.origin)


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group as the planner knows it: restore rule, tokens of a chunk, and the size of a chunk in
    each tier (``footprints[t]``, bytes of lower tier ``t``)."""

    kind: str
    chunk_tokens: int
    footprints: tuple[int, ...]

    def entries(self, batch: ChunkBatch, size: int) -> LazyEntryInfos:
        """The facts for policies about chunks of this group that each take ``size`` in a tier."""
        return LazyEntryInfos(self, batch.group, batch.depths, batch.origin, size)


PAIR_TOKENS = 30_000.0
"""At about this depth a token costs twice as much as the first one, because it attends to all
tokens before it: 2 FLOPs per parameter against 4 x layers x width per earlier token, with the sizes
of a dense model of 8 billion parameters. A policy only compares costs."""
NUMPY_CHUNKS_MIN = 16
"""For fewer chunks, numpy is slower."""


class LazyEntryInfos(Sequence[EntryInfo]):
    """The facts for policies about chunks of one group that each take ``size`` in a tier."""

    __slots__ = ("_depths", "_info", "_origin", "group", "size")

    def __init__(
        self, info: GroupInfo, group: int, depths: Sequence[int], origin: RequestOrigin, size: int
    ) -> None:
        self.group = group
        self.size = size
        self._info = info
        self._depths = depths
        self._origin = origin

    @property
    def priority(self) -> str:
        """The client's priority for these chunks."""
        return self._origin.priority

    def sized(self, size: int) -> LazyEntryInfos:
        """The same chunks in another tier."""
        return LazyEntryInfos(self._info, self.group, self._depths, self._origin, size)

    def chosen(self, flags: Iterable[object]) -> LazyEntryInfos:
        """The chunks whose flag is true."""
        return self._with(list(compress(self._depths, flags)))

    def is_like(self, other: object) -> bool:
        """True if the two batches differ only in depths."""
        return isinstance(other, LazyEntryInfos) and (
            (self.group, self.size, self._info, self._origin)
            == (other.group, other.size, other._info, other._origin)
        )

    def followed_by(self, others: Iterable[LazyEntryInfos]) -> LazyEntryInfos:
        """These chunks followed by similar ones."""
        return self._with([*self._depths, *chain.from_iterable(o._depths for o in others)])

    def _with(self, depths: Sequence[int]) -> LazyEntryInfos:
        return LazyEntryInfos(self._info, self.group, depths, self._origin, self.size)

    def __len__(self) -> int:
        return len(self._depths)

    @overload
    def __getitem__(self, at: int) -> EntryInfo: ...
    @overload
    def __getitem__(self, at: slice) -> LazyEntryInfos: ...
    def __getitem__(self, at: int | slice) -> EntryInfo | LazyEntryInfos:
        if isinstance(at, slice):
            return self._with(self._depths[at])
        return next(iter(self._with((self._depths[at],))))

    def __iter__(self) -> Iterator[EntryInfo]:
        count, depths, origin, info = len(self), self._depths, self._origin, self._info
        hints = self._hints()
        constant = (repeat(value, count) for value in (self.group, info.kind))
        sizes, salts = repeat(self.size, count), repeat(origin.salt, count)
        columns = *constant, depths, sizes, self._costs(), salts, hints
        return map(_entry, zip(*columns, strict=True))

    def hints(self) -> Iterable[Mapping[str, Any]]:
        """The hints of the chunks that have any: see ``policies.base.hints_among``."""
        hints = self._origin.hints
        return filter(None, self._hints()) if hints.stored or hints.pinned_tokens else ()

    def _hints(self) -> Iterable[Mapping[str, Any]]:
        hints = self._origin.hints
        if hints.pinned_tokens:
            return map(hints.of_chunk, self._depths)
        return repeat(hints.stored, len(self))

    def _costs(self) -> Sequence[float]:
        """The cost of recomputing a chunk, in units of a prompt's first token."""
        depths, tokens = self._depths, self._info.chunk_tokens
        # Groups other than full ones read only a window, or a state.
        slope = tokens / PAIR_TOKENS if self._info.kind == FULL else 0.0
        if len(depths) < NUMPY_CHUNKS_MIN:
            return [tokens + slope * max(end - tokens / 2, 0.0) for end in depths]
        if isinstance(depths, range):
            ends = np.arange(depths.start, depths.stop, depths.step)
        else:
            ends = np.asarray(depths)
        found: list[float] = (tokens + slope * np.maximum(ends - tokens / 2, 0.0)).tolist()
        return found


def chosen(infos: Sequence[EntryInfo], flags: Sequence[object]) -> Sequence[EntryInfo]:
    """The chunks whose flag is true."""
    if isinstance(infos, LazyEntryInfos):
        return infos.chosen(flags)
    return list(compress(infos, flags))


def joined(parts: Sequence[Sequence[EntryInfo]]) -> Sequence[EntryInfo]:
    """All chunks, one after another."""
    if len(parts) == 1:
        return parts[0]
    alike = [part for part in parts if isinstance(part, LazyEntryInfos) and part.is_like(parts[0])]
    if len(alike) == len(parts) > 0:
        return alike[0].followed_by(alike[1:])
    return list(chain.from_iterable(parts))


def sized(infos: Sequence[EntryInfo], size: int) -> Sequence[EntryInfo]:
    """The same chunks in a tier where each takes ``size``."""
    if isinstance(infos, LazyEntryInfos):
        return infos.sized(size)
    # ``_replace`` takes three times as long.
    return [EntryInfo(*info[:3], size, *info[4:]) for info in infos]


def sizes_of(infos: Sequence[EntryInfo]) -> list[int]:
    """The size of each chunk in its tier."""
    if isinstance(infos, LazyEntryInfos):
        return [infos.size] * len(infos)
    return list(map(_size_bytes, infos))


_size_bytes = attrgetter("size_bytes")
_entry = partial(tuple.__new__, EntryInfo)  # faster than ``EntryInfo``, which calls Python code

"""Translates chunks that an engine of another geometry wrote: finds obstacles, and lists the
copies.

Only exact translations are made; others are refused. Chunks must end at the same tokens on both
sides, because a key names a chunk's last token and does not show which chunks lie before it. Blocks
may have different sizes within one chunk, heads may be spread over another number of ranks, and
pages may be ordered differently. Recurrent states are never split.

One side's kernel may divide a block into ``ratio`` kernel blocks, the other side's into more or
fewer. The ids of kernel blocks are meaningful only with the ratio of the side that wrote them. The
block of a recurrent state is one kernel block on every side.

Pure except ``apply``, which moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.errors import InvariantError
from offload.namespaces.geometry import (
    COPIES,
    HEAD,
    KERNEL_BLOCK,
    OWN,
    TOKEN,
    Geometry,
    GroupGeometry,
    LayerGeometry,
)


def expand_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Kernel blocks of blocks: block ``b`` is ``b * ratio .. (b + 1) * ratio - 1``.

    ``ratio`` is block size / kernel block size on the side that wrote the blocks; 1 for states.
    """
    return [block * ratio + part for block in blocks for part in range(ratio)]


Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """The reason why stored chunks cannot be read: a field, its value there and here, why they
    conflict, and the flags with which the other side was started."""

    field: str
    stored: Any
    now: Any
    why: str
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.field} was {self.stored} when stored and is {self.now} now: {self.why}"


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Copies ``shape`` units of ``unit_bytes`` from record ``source`` (an index into
    ``GroupTranslation.ranks``).

    Offsets and strides are bytes within the record and within the slot.
    """

    source: int
    shape: tuple[int, ...]
    unit_bytes: int
    from_offset: int
    from_strides: tuple[int, ...]
    to_offset: int
    to_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupTranslation:
    """Describes how to assemble a chunk of a group: from the records of ``ranks``, each of
    ``record_bytes`` (without padding), by ``copies``, into ``chunk_bytes``."""

    ranks: tuple[int, ...]
    record_bytes: int
    chunk_bytes: int
    copies: tuple[StridedCopy, ...]


def obstacles(stored: Geometry, now: Geometry) -> list[Incompatibility]:
    """Everything that prevents chunks of geometry ``stored`` from being read with ``now``."""
    ids = [sorted(side.by_group) for side in (stored, now)]
    if ids[0] != ids[1]:
        return [Incompatibility("groups", ids[0], ids[1], "keys carry the number of their group")]
    return [
        found
        for group in now.groups
        for found in _group_obstacles(stored.by_group[group.group], group, stored, now)
    ]


def translation_of(stored: Geometry, now: Geometry, group: int) -> GroupTranslation:
    """The copies that make a chunk of ``now`` from records of ``stored``; there must be no
    obstacles.

    ``stored`` can come from any rank: all ranks of a side are alike.
    """
    theirs, ours = stored.by_group[group], now.by_group[group]
    offsets = dict(_offsets(theirs))
    ranks: list[int] = []
    copies: list[StridedCopy] = []
    for layer, at in _offsets(ours):
        other, other_at = _layer(theirs, layer.layer), offsets[_layer(theirs, layer.layer)]
        for run in _head_runs(other, layer, stored, now):
            if run.rank not in ranks:
                ranks.append(run.rank)
            pair = _Pair(other, layer, theirs, ours, other_at, at, ranks.index(run.rank))
            copies += pair.copies(run)
    translation = GroupTranslation(
        tuple(ranks), theirs.chunk_bytes, ours.chunk_bytes, tuple(copies)
    )
    moved = sum(int(np.prod(copy.shape)) * copy.unit_bytes for copy in copies)
    if moved != ours.chunk_bytes:
        raise InvariantError(f"group {group}: {moved} of {ours.chunk_bytes} bytes are translated")
    return translation


def apply(translation: GroupTranslation, records: Sequence[Buffer], into: Buffer) -> None:
    """Carry out a translation: ``records[i]`` is that of rank ``translation.ranks[i]``.

    numpy refuses views that leave their buffer, with ``TypeError`` or ``ValueError``.
    """
    for copy in translation.copies:
        shape = (*copy.shape, copy.unit_bytes)
        there = np.ndarray(
            shape, np.uint8, records[copy.source], copy.from_offset, (*copy.from_strides, 1)
        )
        here = np.ndarray(shape, np.uint8, into, copy.to_offset, (*copy.to_strides, 1))
        np.copyto(here, there)


# -- comparing --------------------------------------------------------------------------------


def _group_obstacles(
    theirs: GroupGeometry, ours: GroupGeometry, stored: Geometry, now: Geometry
) -> Iterator[Incompatibility]:
    where = f"groups[{ours.group}]"
    if (theirs.kind, theirs.spec) != (ours.kind, ours.spec):
        yield Incompatibility(f"{where}.spec", theirs.spec, ours.spec, "another kind of KV cache")
        return
    if theirs.chunk_tokens != ours.chunk_tokens:
        yield Incompatibility(
            f"{where}.chunk_tokens",
            f"{theirs.chunk_tokens} ({theirs.chunk_blocks} blocks of {theirs.block_tokens})",
            f"{ours.chunk_tokens} ({ours.chunk_blocks} blocks of {ours.block_tokens})",
            "chunks end at other tokens",
            f'--block-size {theirs.block_tokens} and "chunk_blocks": {theirs.chunk_blocks}',
        )
        return
    names = [sorted(layer.layer for layer in side.layers) for side in (theirs, ours)]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))
        yield Incompatibility(
            f"{where}.layers", len(names[0]), len(names[1]), f"only one side has {odd[:3]}"
        )
        return
    for layer in ours.layers:  # one layer represents all layers that differ in the same way
        found = list(_layer_obstacles(where, _layer(theirs, layer.layer), layer, stored, now))
        found += _cut_obstacles(where, theirs, ours, layer)
        if found:
            yield from found
            return


def _layer_obstacles(
    where: str, theirs: LayerGeometry, ours: LayerGeometry, stored: Geometry, now: Geometry
) -> Iterator[Incompatibility]:
    name = ours.layer
    if OWN in (theirs.split, ours.split) and stored.ranks != now.ranks:
        why = f"layer {name} ({ours.form}) cannot be split over other ranks"
        flags = f"--tensor-parallel-size {stored.ranks}"
        yield Incompatibility("parallel.tensor", stored.ranks, now.ranks, why, flags)
        return
    for field in ("split", "form"):
        there, here = getattr(theirs, field), getattr(ours, field)
        if there != here:
            why = f"layer {name} stores the same content as different bytes"
            yield Incompatibility(f"{where}.{field}", there, here, why)
            return
    if ours.split == OWN:
        if theirs.page_bytes != ours.page_bytes:
            why = f"layer {name} ({ours.form}) can only be read as it is"
            yield Incompatibility(f"{where}.page_bytes", theirs.page_bytes, ours.page_bytes, why)
        return
    by_token = _by_token(theirs) and _by_token(ours)
    if not by_token and theirs.kernel_tokens != ours.kernel_tokens:
        why = f"the order of tokens in a kernel block of {ours.form} is unknown (layer {name})"
        yield Incompatibility(
            f"{where}.kernel_block_size", theirs.kernel_tokens, ours.kernel_tokens, why
        )
    elif theirs.unit_bytes != ours.unit_bytes:
        why = f"layer {name} has heads of other sizes"
        yield Incompatibility(f"{where}.head_bytes", theirs.unit_bytes, ours.unit_bytes, why)
    elif ours.split != COPIES:
        yield from _head_obstacles(where, theirs, ours, stored, now)


def _by_token(layer: LayerGeometry) -> bool:
    return layer.tokens == layer.kernel_tokens


def _head_obstacles(
    where: str, theirs: LayerGeometry, ours: LayerGeometry, stored: Geometry, now: Geometry
) -> Iterator[Incompatibility]:
    """Check that the heads can be mapped.

    Both sides must have the same total number of heads, unless one side replicates each head. vLLM
    replicates heads only if every rank has one head.
    """
    counts = sorted(
        [(stored.ranks * theirs.heads, theirs.heads), (now.ranks * ours.heads, ours.heads)]
    )
    (few, _), (many, each) = counts
    if few != many and (each != 1 or many % few):
        yield Incompatibility(
            f"{where}.heads",
            f"{theirs.heads} on each of {stored.ranks} ranks",
            f"{ours.heads} on each of {now.ranks}",
            f"the heads of layer {ours.layer} are divided differently",
            f"--tensor-parallel-size {stored.ranks}",
        )


def _cut_obstacles(
    where: str, theirs: GroupGeometry, ours: GroupGeometry, layer: LayerGeometry
) -> Iterator[Incompatibility]:
    if layer.split == OWN and theirs.block_tokens != ours.block_tokens:
        why = f"layer {layer.layer} ({layer.form}) can only be read as it is"
        yield Incompatibility(f"{where}.block_size", theirs.block_tokens, ours.block_tokens, why)


# -- making a translation ---------------------------------------------------------------------


def _offsets(group: GroupGeometry) -> Iterator[tuple[LayerGeometry, int]]:
    """Every layer with the offset of its page in a block."""
    at = 0
    for layer in group.layers:
        yield layer, at
        at += layer.page_bytes


def _layer(group: GroupGeometry, name: str) -> LayerGeometry:
    return next(layer for layer in group.layers if layer.layer == name)


class _HeadRun(NamedTuple):
    """``heads`` consecutive heads, which one ``rank`` of the other side has, too."""

    rank: int
    head: int
    from_head: int
    heads: int


class _UnitRun(NamedTuple):
    """``tokens`` consecutive units that lie in one kernel block on either side."""

    from_block: int
    from_token: int
    block: int
    token: int
    tokens: int


class _Unit(NamedTuple):
    """A unit of a chunk; ``kernel_block`` counts from the chunk's begin."""

    kernel_block: int
    head: int
    token: int


def _head_runs(
    theirs: LayerGeometry, ours: LayerGeometry, stored: Geometry, now: Geometry
) -> Iterator[_HeadRun]:
    """Yield the runs that contain all heads of this rank.

    The heads that all ranks of a side store, including copies, are numbered in one row. If a side
    stores ``S`` heads and ``H`` of them differ, number ``n`` is a copy of head ``n * H // S``. So
    our number ``n`` is the same head as their number ``n * their_heads // our_heads``.
    """
    if ours.split == OWN:
        yield _HeadRun(now.rank, 0, 0, 1)
        return
    their_heads = stored.ranks * theirs.heads
    run: _HeadRun | None = None
    for head in range(ours.heads):
        their_head = (now.rank * ours.heads + head) * their_heads // (now.ranks * ours.heads)
        rank, there = divmod(their_head, theirs.heads)
        if run is not None and (run.rank, run.from_head + run.heads) == (rank, there):
            run = run._replace(heads=run.heads + 1)
            continue
        if run is not None:
            yield run
        run = _HeadRun(rank, head, there, 1)
    if run is not None:
        yield run


@dataclass(frozen=True, slots=True)
class _Pair:
    """One layer on both sides; ``from_at`` and ``at`` are the offsets of its page in a block."""

    theirs: LayerGeometry
    ours: LayerGeometry
    their_group: GroupGeometry
    our_group: GroupGeometry
    from_at: int
    at: int
    source: int

    def copies(self, run: _HeadRun) -> Iterator[StridedCopy]:
        """All kernel blocks of a chunk, for a run of heads."""
        theirs, ours = self.theirs, self.ours
        same_cut = (self.their_group.chunk_blocks, theirs.kernel_blocks, theirs.tokens) == (
            self.our_group.chunk_blocks,
            ours.kernel_blocks,
            ours.tokens,
        )
        if same_cut:
            shape = (self.our_group.chunk_blocks, ours.kernel_blocks, run.heads, ours.tokens)
            yield self._copy(shape, _Unit(0, run.from_head, 0), _Unit(0, run.head, 0))
            return
        for units in self._overlaps():
            there = _Unit(units.from_block, run.from_head, units.from_token)
            here = _Unit(units.block, run.head, units.token)
            yield self._copy((1, 1, run.heads, units.tokens), there, here)

    def _overlaps(self) -> Iterator[_UnitRun]:
        """Yield the runs of units of a chunk. Ids are expanded with the ratio of the side that they
        belong to."""
        blocks_there = expand_blocks(
            range(self.their_group.chunk_blocks), self.theirs.kernel_blocks
        )
        blocks_here = expand_blocks(range(self.our_group.chunk_blocks), self.ours.kernel_blocks)
        size_there, size_here = self.theirs.tokens, self.ours.tokens
        end = min(len(blocks_there) * size_there, len(blocks_here) * size_here)
        at = 0
        while at < end:
            there, from_token = divmod(at, size_there)
            here, token = divmod(at, size_here)
            tokens = min(size_there - from_token, size_here - token)
            yield _UnitRun(blocks_there[there], from_token, blocks_here[here], token, tokens)
            at += tokens

    def _copy(self, shape: tuple[int, ...], there: _Unit, here: _Unit) -> StridedCopy:
        """``there`` and ``here`` are the first units."""
        from_offset, from_strides = _offset_and_strides(
            self.theirs, self.their_group, self.from_at, there
        )
        to_offset, to_strides = _offset_and_strides(self.ours, self.our_group, self.at, here)
        return StridedCopy(
            self.source,
            shape,
            self.ours.unit_bytes,
            from_offset,
            from_strides,
            to_offset,
            to_strides,
        )


def _offset_and_strides(
    layer: LayerGeometry, group: GroupGeometry, at: int, first: _Unit
) -> tuple[int, tuple[int, ...]]:
    """The offset of a unit in a chunk, and the strides of blocks, kernel blocks, heads and
    tokens."""
    block, part = divmod(first.kernel_block, layer.kernel_blocks)
    step = layer.strides
    strides = (group.block_bytes, step[KERNEL_BLOCK], step[HEAD], step[TOKEN])
    offset = (
        block * strides[0] + part * strides[1] + first.head * strides[2] + first.token * strides[3]
    )
    return at + offset, strides

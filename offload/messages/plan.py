"""Plans: what the scheduler side sends to the workers in a step. `offload.messages.report` has the
reports that the workers send back.

Plain frozen values, cheap to pickle. A job has one id and ends exactly once on every rank. The
jobs of one plan are posted in this order: deletes, stores, write-throughs, loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, overload

import msgspec

from offload.layout.keys import pack_keys, unpack_keys

STAGED = -1
"""Slot number of a load item that passes through one of the worker's staging buffers and gets no
slot."""
IN_SLAB = -1
"""Tier of a load item whose bytes are already in its slot, or are being read into it."""


_pack = msgspec.msgpack.encode
_SLOTS = msgspec.msgpack.Decoder(list[int])
_ROWS = msgspec.msgpack.Decoder(tuple[list[int], list[int]])


class StoreJob:
    """Copies chunks of one group from GPU blocks into slots.

    ``blocks`` has equal parts: the i-th part goes to ``slots[i]``. The job is pickled in the same
    way as ``LoadJob``.
    """

    __slots__ = ("_rows", "group", "job")

    def __init__(self, job: int, group: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.job = job
        self.group = group
        self._rows: tuple[Sequence[int], Sequence[int]] | bytes = blocks, slots

    @property
    def blocks(self) -> Sequence[int]:
        """GPU blocks of all chunks, one after another."""
        return self._thawed()[0]

    @property
    def slots(self) -> Sequence[int]:
        """The slot of each chunk."""
        return self._thawed()[1]

    def _thawed(self) -> tuple[Sequence[int], Sequence[int]]:
        if isinstance(self._rows, bytes):
            self._rows = _ROWS.decode(self._rows)
        assert not isinstance(self._rows, bytes)
        return self._rows

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self._rows
        frozen = rows if isinstance(rows, bytes) else _pack(rows)
        return _frozen_store, (self.job, self.group, frozen)

    def __repr__(self) -> str:
        return f"StoreJob({self.job}, {self.group}, {self.blocks}, {self.slots})"


def _frozen_store(job: int, group: int, rows: bytes) -> StoreJob:
    found = StoreJob(job, group, (), ())
    found._rows = rows
    return found


@dataclass(frozen=True, slots=True)
class DigestJob:
    """Digests chunks of one group as they are in the KV cache (`offload.worker.block_verifier`);
    has no answer.

    ``blocks`` is as in ``StoreJob``. ``early`` means that the chunks were complete before this
    step, and that its forward pass may overwrite them.
    """

    group: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    early: bool = False


class LoadItem(NamedTuple):
    """One chunk of a load.

    ``tier`` is the first tier to read the chunk from (``IN_SLAB``: no read). ``slot`` is the slot
    that holds the chunk or receives it (``STAGED``: one of the worker's buffers). Blocks with
    negative ids are not filled.

    It is a tuple for speed: a long prompt has thousands of items, which vLLM's threads create,
    pickle and unpickle, and a dataclass takes 30 times as long.
    """

    key: bytes
    group: int
    blocks: tuple[int, ...]
    slot: int
    tier: int


Row = tuple[bytes, int, tuple[int, ...], int, int]


class Columns(NamedTuple):
    """The chunks of a load by columns: key, group, GPU blocks, slot and tier, as in ``LoadItem``.

    The blocks of all chunks are in one list. ``widths`` has the number of blocks of each chunk, or
    a single number if it is the same for all chunks. A long load has thousands of chunks, which are
    planned and pickled on vLLM's scheduler thread and unpickled on its model runner's. On these
    threads, flat lists take a fraction of the time of one object per chunk. The rank that carries
    out the load builds rows from the columns, on its own thread.
    """

    keys: Sequence[bytes]
    groups: Sequence[int]
    blocks: Sequence[int]
    widths: Sequence[int]
    slots: Sequence[int]
    tiers: Sequence[int]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Columns:
        """Make columns from these rows."""
        keys, groups, blocks, slots, tiers = map(list, zip(*rows, strict=True))
        flat = list(chain.from_iterable(blocks))
        return cls(keys, groups, flat, one_width(list(map(len, blocks))), slots, tiers)

    def rows(self) -> Iterator[Row]:
        """One tuple per chunk."""
        widths = list(self.widths)
        if len(widths) == 1:
            widths *= len(self.groups)
        ends = accumulate(widths)
        blocks = [tuple(self.blocks[e - w : e]) for e, w in zip(ends, widths, strict=True)]
        return zip(self.keys, self.groups, blocks, self.slots, self.tiers, strict=True)

    def pack(self) -> Packed:
        """The same columns in fewer objects."""
        return Packed(*pack_keys(self.keys), *self[1:])


NO_CHUNKS = Columns((), (), (), (), (), ())


def one_width(widths: list[int]) -> list[int]:
    """The widths, or a single one if all are equal."""
    return widths[:1] if len(set(widths)) == 1 else widths


class Packed(NamedTuple):
    """``Columns`` with all keys in one piece. ``key_bytes`` are their lengths: one per key, or a
    single number if all are equal."""

    keys: bytes
    key_bytes: Sequence[int]
    groups: Sequence[int]
    blocks: Sequence[int]
    widths: Sequence[int]
    slots: Sequence[int]
    tiers: Sequence[int]

    def unpack(self) -> Columns:
        """The columns that were packed."""
        return Columns(unpack_keys(self.keys, self.key_bytes), *self[2:])


_PACKED = msgspec.msgpack.Decoder(Packed)


class LoadJob:
    """Restores chunks for one request. It succeeds only if every item does.

    A long load is sent in parts, in several plans: ``part`` counts from 0, and the load is complete
    only after the part that ``is_last``. All parts are one job, which is answered once.

    A load that ``is_ahead`` reads chunks into slots for requests that do not wait for a load yet.
    A probe is a load without a request, whose items name no blocks: it only reads. Items are made
    on first use, which happens on the worker's loop, not on vLLM's threads; until then, items from
    another process stay pickled.
    """

    __slots__ = ("_chunks", "_items", "is_ahead", "is_last", "job", "part", "request")

    def __init__(
        self,
        job: int,
        request: str,
        chunks: Iterable[LoadItem] | Columns | bytes,
        part: int = 0,
        is_last: bool = True,
        is_ahead: bool = False,
    ) -> None:
        self.job = job
        self.request = request
        self.part = part
        self.is_last = is_last
        self.is_ahead = is_ahead
        self._items: tuple[LoadItem, ...] | None = None
        if not isinstance(chunks, Columns | bytes):
            self._items = tuple(chunks)
            chunks = Columns.of(self._items) if self._items else NO_CHUNKS
        self._chunks = chunks

    @property
    def items(self) -> tuple[LoadItem, ...]:
        """The chunks to restore."""
        if self._items is None:
            chunks = self._chunks
            columns = chunks if isinstance(chunks, Columns) else _thawed(chunks)
            self._items = tuple(map(_load_item, columns.rows()))
        return self._items

    def __reduce__(self) -> tuple[Any, ...]:
        chunks = self._chunks
        if isinstance(chunks, Columns):
            chunks = _pack(chunks.pack())
        return LoadJob, (self.job, self.request, chunks, self.part, self.is_last, self.is_ahead)

    def __repr__(self) -> str:
        part = f"part {self.part}{', the last' if self.is_last else ''}"
        return f"LoadJob({self.job}, {self.request!r}, {self.items}, {part})"


def _thawed(chunks: bytes) -> Columns:
    return _PACKED.decode(chunks).unpack()


_load_item = partial(tuple.__new__, LoadItem)  # faster than ``LoadItem``, which calls Python code


class Keys(Sequence[bytes]):
    """Keys of a plan.

    The keys are one piece of bytes while they travel, and on vLLM's threads; the first access
    separates them.
    """

    __slots__ = ("_keys", "_lengths")

    def __init__(self, keys: Sequence[bytes] | bytes, lengths: Sequence[int] = ()) -> None:
        self._keys: tuple[bytes, ...] | bytes = keys if isinstance(keys, bytes) else tuple(keys)
        self._lengths = lengths

    def _thawed(self) -> tuple[bytes, ...]:
        if isinstance(self._keys, bytes):
            self._keys = unpack_keys(self._keys, self._lengths)
        return self._keys

    def __len__(self) -> int:
        if isinstance(self._keys, bytes) and len(self._lengths) == 1 and self._lengths[0]:
            return len(self._keys) // self._lengths[0]
        return len(self._thawed())

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, at: int | slice) -> bytes | tuple[bytes, ...]:
        return self._thawed()[at]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._thawed())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._thawed() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as of other sequences that may change

    def __reduce__(self) -> tuple[Any, ...]:
        keys = self._keys
        return Keys, (keys, self._lengths) if isinstance(keys, bytes) else pack_keys(keys)

    def __repr__(self) -> str:
        return repr(self._thawed())


class WriteThroughJob:
    """Writes chunks from ``slots`` to a lower tier, by key. The job is pickled in the same way as
    ``LoadJob``."""

    __slots__ = ("_slots", "group", "job", "keys", "tier")

    def __init__(
        self,
        job: int,
        tier: int,
        group: int,
        keys: Sequence[bytes],
        slots: Sequence[int] | bytes,
    ) -> None:
        self.job = job
        self.tier = tier
        self.group = group
        self.keys: Sequence[bytes] = keys
        self._slots: Sequence[int] | bytes = slots

    @property
    def slots(self) -> Sequence[int]:
        """The slot of each chunk."""
        if isinstance(self._slots, bytes):
            self._slots = _SLOTS.decode(self._slots)
        assert not isinstance(self._slots, bytes)
        return self._slots

    def __reduce__(self) -> tuple[Any, ...]:
        slots = self._slots
        frozen = slots if isinstance(slots, bytes) else _pack(slots)
        return WriteThroughJob, (self.job, self.tier, self.group, Keys(self.keys), frozen)

    def __repr__(self) -> str:
        return f"WriteThroughJob({self.job}, {self.tier}, {self.group}, {self.keys}, {self.slots})"


class PresenceQuery:
    """Queries a shared tier: which of ``keys`` does it hold?"""

    __slots__ = ("keys", "number", "tier")

    def __init__(self, number: int, tier: int, keys: Sequence[bytes]) -> None:
        self.number = number
        self.tier = tier
        self.keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_query, (self.number, self.tier, *pack_keys(self.keys))


def _unpack_query(number: int, tier: int, packed: bytes, lengths: Sequence[int]) -> PresenceQuery:
    return PresenceQuery(number, tier, unpack_keys(packed, lengths))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of all workers for one scheduler step.

    ``fence`` names store jobs whose source blocks get new content in this step: they must have read
    those blocks before the step's forward pass. ``cancel_loads`` ends all loads of earlier plans as
    failed, before everything else in the plan. ``reset`` says that all tiers are reset, and what is
    known of their content is forgotten; ``epochs`` are new epochs of lower tiers, by
    tier number. ``deletes`` and ``touches`` have the keys to delete, and the used keys, by lower
    tier. ``queries`` go to shared tiers at any time. ``digests`` are present only with
    ``"verify": "device"``. ``idle`` means that this step has no forward pass.
    """

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    write_throughs: tuple[WriteThroughJob, ...] = ()
    deletes: Mapping[int, Keys] = field(default_factory=dict)
    touches: Mapping[int, Keys] = field(default_factory=dict)
    fence: tuple[int, ...] = ()
    reset: bool = False
    cancel_loads: bool = False
    epochs: Mapping[int, int] = field(default_factory=dict)
    queries: tuple[PresenceQuery, ...] = ()
    digests: tuple[DigestJob, ...] = ()
    idle: bool = False

    @property
    def empty(self) -> bool:
        """True if the plan has no work for a worker."""
        return not (
            self.stores
            or self.loads
            or self.write_throughs
            or self.deletes
            or self.touches
            or self.fence
            or self.reset
            or self.cancel_loads
            or self.epochs
            or self.queries
            or self.digests
        )

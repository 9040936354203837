"""The index of one tier: its chunks, their states and their locations.

Pure and synchronous. The index owns states, pins and locations; the eviction policy only orders the
resident keys. A resident chunk is in two dicts (the index's and the policy's) and nowhere else,
because a disk tier may hold ten million of them; pins and the rarer states have separate dicts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import filterfalse, islice, repeat
from typing import NoReturn

from offload.errors import InvariantError
from offload.index.capacity import Capacity, Reservation
from offload.index.chunk_batch import sizes_of
from offload.index.retention import NOTHING, Evict, NamedVictims, Retention, UnwrittenChunks
from offload.index.states import (
    TRANSITIONS,
    ChunkEvent,
    ChunkState,
    Route,
    Transition,
    entered_by,
    pinned_in_place,
    route,
)
from offload.telemetry.removed_chunks import RemovalLog
from policies.base import EntryInfo, EvictionPolicy, RemoveCause
from policies.guarded import contained

BULK_KEYS_MIN = 16
"""From this number of keys on, the bulk paths are faster than a loop."""


class TierIndex:
    """States and locations of one tier's chunks. Owned by the planner; used on its thread.

    States change as ``offload.index.states.TRANSITIONS`` says. Methods that change many chunks at
    once use what the index derives from the table when it is created; every other change is looked
    up when it occurs (``_apply``). A policy other than our LRU is guarded: one that raises, is slow
    or names keys that it must not is replaced by LRU (``policies.guarded``).

    With ``low_watermark`` < 1, eviction runs ahead: a full tier is emptied to this share of its
    capacity, to have free space in advance. ``retention`` knows which chunks must not be evicted.
    """

    def __init__(
        self, name: str, space: Capacity, policy: EvictionPolicy, low_watermark: float = 1.0
    ) -> None:
        self.name = name
        self.space = space
        self.evictions = 0
        self._pins: Counter[bytes] = Counter()
        self.retention = Retention(self._pins)
        self.unwritten = UnwrittenChunks()
        self._removals = RemovalLog()
        self._low = int(space.capacity * low_watermark)
        # never replaced, because the policy's guard refers to this object
        self._resident: dict[bytes, int] = {}
        self.policy = contained(policy, name, self._resident)
        self._victims = NamedVictims()
        self._filling: dict[bytes, int] = {}
        self._doomed: dict[bytes, int] = {}
        self._locations: dict[ChunkState, dict[bytes, int] | None] = {
            ChunkState.ABSENT: None,
            ChunkState.FILLING: self._filling,
            ChunkState.RESIDENT: self._resident,
            ChunkState.PINNED: self._resident,
            ChunkState.DOOMED: self._doomed,
        }
        self._reserved = entered_by(ChunkEvent.RESERVE, self._locations)
        self._recovered = entered_by(ChunkEvent.RECOVER, self._locations)
        self._commits = route(ChunkEvent.COMMIT, self._locations, ChunkState.FILLING)
        self._aborts = route(ChunkEvent.ABORT, self._locations, ChunkState.FILLING)
        self._drops = route(ChunkEvent.DROP, self._locations, ChunkState.RESIDENT)
        self._evictions = route(ChunkEvent.EVICT, self._locations, ChunkState.RESIDENT)
        self._pin_stays, _ = pinned_in_place(ChunkEvent.PIN, 1, self._locations)
        _, self._unpin_moves = pinned_in_place(ChunkEvent.UNPIN, -1, self._locations)

    def log_removals(self, log: RemovalLog) -> None:
        """From now on, record in ``log`` what leaves this tier."""
        self._removals = log

    # -- queries -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: object) -> bool:
        return key in self._resident

    @property
    def resident(self) -> Mapping[bytes, int]:
        """The locations of the keys that can be hit, for queries about many keys at once."""
        return self._resident

    def some(self, count: int) -> tuple[bytes, ...]:
        """Up to ``count`` resident keys, in no particular order."""
        return tuple(islice(self._resident, count))

    @property
    def filling_count(self) -> int:
        """The number of chunks that are being written."""
        return len(self._filling)

    def is_in_use(self, key: bytes) -> bool:
        """True if a job uses this chunk now, or soon will."""
        return self.retention.is_in_use(key)

    def is_filling(self, key: bytes) -> bool:
        """True if a job is writing this chunk now."""
        return key in self._filling

    @property
    def barred(self) -> tuple[Mapping[bytes, int], ...]:
        """The keys being filled and the doomed keys: they cannot be hit, and not be reserved."""
        return tuple(filter(None, (self._filling, self._doomed)))

    def filling_among(self, keys: Sequence[bytes]) -> set[bytes]:
        """The keys that a job is writing now."""
        return set(filter(self._filling.__contains__, keys)) if self._filling else set()

    def are_absent(self, keys: Collection[bytes]) -> bool:
        """True if all these chunks could be reserved."""
        return all(state.keys().isdisjoint(keys) for state in (self._resident, *self.barred))

    def is_absent(self, key: bytes) -> bool:
        """True if the chunk could be reserved."""
        return not (key in self._resident or key in self._filling or key in self._doomed)

    def location(self, key: bytes) -> int:
        """The location of a resident or filling chunk."""
        return self._filling[key] if key in self._filling else self._resident[key]

    def state(self, key: bytes) -> ChunkState:
        """The chunk's state."""
        if key in self._doomed:
            return ChunkState.DOOMED
        if key in self._filling:
            return ChunkState.FILLING
        if key in self._resident:
            return ChunkState.PINNED if key in self._pins else ChunkState.RESIDENT
        return ChunkState.ABSENT

    # -- writing -----------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[bytes],
        infos: Sequence[EntryInfo],
        evict: Evict = Evict.ANYTHING,
        protect: Container[bytes] = NOTHING,
    ) -> Reservation:
        """ABSENT -> FILLING for a prefix of ``keys``, which the caller has just found absent.

        Where space is missing, the policy's victims are evicted, as far as ``evict`` allows, but
        none of ``protect``. Stops at the first key without space, so the granted keys are a prefix
        without a hole. Pass the infos of the granted keys to ``commit``, too. Raises
        ``InvariantError`` if a key is named twice or is being written, or if a key of a short batch
        is not absent for another reason.
        """
        evicted: list[bytes] = []
        sizes = sizes_of(infos)
        make_space = partial(self._make_space, evict=evict, protect=protect)
        granted = None
        if len(keys) >= BULK_KEYS_MIN:
            granted = self._reserve_at_once(keys, sizes, make_space, evicted)
        if granted is None:
            granted, take = [], self.space.take
            for key, size in zip(keys, sizes, strict=True):
                if not self.is_absent(key):
                    # raises, because the table does not allow it
                    self._check(key, ChunkEvent.RESERVE)
                location = take(size)
                if location is None:
                    evicted += make_space(self.space.missing(size))
                    location = take(size)
                if location is None:
                    break
                self._reserved[key] = location
                granted.append(location)
        return Reservation(tuple(granted), tuple(evicted))

    def _reserve_at_once(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        make_space: Callable[[int], list[bytes]],
        evicted: list[bytes],
    ) -> Sequence[int] | None:
        """``reserve`` for many absent keys; returns ``None``, with nothing reserved, if one is
        named twice. Raises ``InvariantError`` if one is being written: its first location is lost
        then, and it cannot be committed."""
        locations = self.space.take_all(sizes)
        if locations is None:
            evicted += make_space(self.space.missing_all(sizes))
            locations = self.space.take_all(sizes)
        if locations is None:
            locations = self.space.take_some(sizes)
            keys = keys[: len(locations)]
        reserved, before = self._reserved, len(self._reserved)
        reserved.update(zip(keys, locations, strict=True))
        if len(reserved) < before + len(keys):  # a key is named twice, or is being written
            is_taken = len(reserved) < before + len(set(keys))
            deque(map(reserved.pop, keys, repeat(None)), maxlen=0)
            self.space.give_all(locations)
            if is_taken:
                raise InvariantError(f"index {self.name}: a key is reserved while it is written")
            return None
        return locations

    def commit(self, keys: Sequence[bytes], infos: Sequence[EntryInfo]) -> list[bytes]:
        """FILLING -> RESIDENT. Keys that were doomed meanwhile become ABSENT; returns the other
        keys.

        ``keys`` are in prefix order; the head of the prefix ends up youngest.
        """
        committed: list[bytes] = []
        try:
            self._move(keys[::-1], ChunkEvent.COMMIT, self._commits, committed)
        finally:  # the policy must know which keys are resident, even if another key was wrong
            if len(committed) == len(keys):
                infos = infos[::-1]
            else:
                infos = list(map(dict(zip(keys, infos, strict=True)).__getitem__, committed))
            self.policy.insert_all(committed, infos)
        committed.reverse()
        return committed

    def abort(self, keys: Iterable[bytes]) -> None:
        """FILLING -> ABSENT (DOOMED while other jobs still pin the chunk)."""
        self._removals.note(keys := list(keys))  # a lookup may have relied on these chunks
        self._move(keys, ChunkEvent.ABORT, self._aborts, [])

    def recover(self, keys: Sequence[bytes], infos: Sequence[EntryInfo]) -> list[bytes]:
        """Enter chunks found after a restart, oldest first; return those that did not fit."""
        sizes = sizes_of(infos)
        if len(keys) == len(sizes) > 0 and sizes.count(sizes[0]) == len(sizes):
            locations = dict.fromkeys(keys, sizes[0])  # takes half the time
        else:
            locations = dict(zip(keys, sizes, strict=True))
        is_plain = not (self._resident or self._filling or self._doomed)
        if is_plain and len(locations) == len(keys) and self.space.take_bytes(sum(sizes)):
            self._recovered.update(locations)
            # keeps this dict, so that millions of entries are not copied
            self.policy.insert_all(locations, infos)
            return []
        rejected = []
        for key, info in zip(keys, infos, strict=True):
            location = self.space.take(info.size_bytes) if self.is_absent(key) else None
            if location is None:
                rejected.append(key)
                continue
            self._apply(key, ChunkEvent.RECOVER, location)
            self.policy.insert(key, info)
        return rejected

    # -- uses --------------------------------------------------------------------------------------

    def pin(self, keys: Collection[bytes]) -> None:
        """Keep RESIDENT or FILLING chunks in their locations until each pin is undone."""
        rest: Collection[bytes] = keys
        for stay in self._pin_stays:
            if not (rest := list(filterfalse(stay.__contains__, rest))):
                self._pins.update(keys)
                return
        for key in rest:
            self._apply(key, ChunkEvent.PIN)
        self._pins.update(filterfalse(set(rest).__contains__, keys))

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one ``pin`` per key; the last one frees the location of a DOOMED chunk."""
        pins, moves, keys = self._pins, self._unpin_moves, list(keys)
        if len(keys) >= BULK_KEYS_MIN and not moves:  # mostly one pin for each chunk
            counts = list(map(pins.pop, keys, repeat(0)))
            if counts.count(1) == len(keys):
                return
            pins.update({key: n for key, n in zip(keys, counts, strict=True) if n})
        for key in keys:
            count = pins.get(key, 0)
            if count == 0 or key in moves:
                self._apply(key, ChunkEvent.UNPIN)
            elif count == 1:
                pins.pop(key)  # ``del`` of a ``Counter`` is a Python function
            else:
                pins[key] = count - 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record one request's use of these keys, in prefix order; absent ones are ignored."""
        self._victims.forget(keys)
        self.policy.touch(keys)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget chunks, so that they cannot be hit any more. Returns those that were resident."""
        dropped: list[bytes] = []
        self._move(list(keys), ChunkEvent.DROP, self._drops, dropped)
        self._victims.forget(dropped)
        self.policy.remove_all(dropped, RemoveCause.DROPPED)
        self._removals.note(dropped)
        self.unwritten.discard(dropped)
        return dropped

    def evict(self, count_bytes: int) -> list[bytes]:
        """Evict by policy until ``used`` has fallen by this much or nothing more can be evicted."""
        return self._make_space(count_bytes, Evict.ANYTHING, NOTHING)

    def clear(self) -> None:
        """Forget every chunk at once; chunks in use stay DOOMED until their jobs release them."""
        for key in list(self._filling):
            self._apply(key, ChunkEvent.DROP)
        pinned = self._pins.keys() & self._resident.keys()
        self._move(list(pinned), ChunkEvent.DROP, self._drops, [])
        dropped = self._drops.free
        if dropped is None:
            self.space.give_all(self._resident.values())
        else:
            dropped.update(self._resident)
        self._resident.clear()
        self.unwritten.clear()
        self._removals.note_all()
        self._victims.clear()
        self.policy.clear()

    def check(self) -> None:
        """Verify the invariants; raises ``InvariantError``. O(n), for tests and debug mode."""
        locations = [*self._resident.values(), *self._filling.values(), *self._doomed.values()]
        used = sum(self.space.amount(location) for location in locations)
        problems = []
        if used != self.space.used or used > self.space.capacity:
            problems.append(f"locations {used}, used {self.space.used} of {self.space.capacity}")
        if (known := len(self.policy)) != len(self):
            problems.append(f"policy {known} keys, resident {len(self)}")
        states = [set(self._resident), set(self._filling), set(self._doomed)]
        if sum(map(len, states)) != len(set.union(*states)):
            problems.append("a key is in two states")
        if not set(self._victims) <= set(self._resident):
            problems.append("a victim is not resident")
        if not set(self._pins) <= set.union(*states):
            problems.append("a pinned key is absent")
        if not set(self._doomed) <= set(self._pins):
            problems.append("a doomed key is not pinned")
        if problems:
            raise InvariantError(f"index {self.name}: " + "; ".join(problems))

    # -- inside ------------------------------------------------------------------------------

    def _make_space(self, missing: int, evict: Evict, protect: Container[bytes]) -> list[bytes]:
        """Evict until ``missing`` is free and the low watermark is reached, as far as ``evict``
        allows."""
        if evict is Evict.NOTHING:
            return []
        space, evictable = self.space, self.retention.evictable(protect)
        if missing and self._low < space.capacity:
            missing = max(missing, space.used - self._low)
        evicted, freed, is_sparing = list[bytes](), 0, bool(self.retention.wanted)
        while freed < missing:
            per_key = max(1, space.used // max(1, len(self) + len(self._filling)))
            count = max(1, (missing - freed + per_key - 1) // per_key)
            names = self._victims.choose(self.policy, count, evictable)
            if not names and is_sparing:  # chunks that waiting requests want are evicted last
                is_sparing, evictable = False, self.retention.evictable(protect, spare=False)
                continue
            if evict is Evict.WRITTEN:
                names = list(self.unwritten.before_first(names))
            if not names:
                break
            freed += self._evict(names)  # type: ignore[arg-type]  # policies see Hashable
            evicted += names  # type: ignore[arg-type]  # policies see Hashable
        return evicted

    def _evict(self, keys: Sequence[bytes]) -> int:
        """RESIDENT -> ABSENT; returns the freed space."""
        used = self.space.used
        if not self._move_all(keys, self._evictions):
            for key in keys:
                self._check(key, ChunkEvent.EVICT)
            self._refuse(keys[0], ChunkEvent.EVICT)  # a key is named twice
        self._victims.forget(keys)
        self.policy.remove_all(keys, RemoveCause.EVICTED)
        self.evictions += len(keys)
        self._removals.note(keys)
        if self.unwritten:
            self.unwritten.give_up(keys)
        return used - self.space.used

    # -- the state machine -------------------------------------------------------------------

    def _check(self, key: bytes, event: ChunkEvent) -> tuple[ChunkState, Transition]:
        """The chunk's state and the transition of this event; raises ``InvariantError``."""
        state = self.state(key)
        transition = TRANSITIONS[event].get(state)
        if transition is None or self._pins.get(key, 0) + transition.pins < 0:
            self._refuse(key, event)
        return state, transition

    def _apply(self, key: bytes, event: ChunkEvent, location: int = 0) -> None:
        """Apply one event to one chunk. ``location`` is needed for a chunk that was absent."""
        state, (free, pinned, pins) = self._check(key, event)
        count = self._pins.get(key, 0)
        if pins:
            count += pins
            if count:
                self._pins[key] = count
            else:
                self._pins.pop(key)
        source, target = self._locations[state], self._locations[pinned if count else free]
        if source is target:
            return
        if source is not None:
            location = source.pop(key)
        if target is not None:
            target[key] = location
        else:
            self.space.give(location)

    def _move(
        self, keys: Sequence[bytes], event: ChunkEvent, route: Route, moved: list[bytes]
    ) -> None:
        """Apply one event to each of these chunks; add those that took the route to ``moved``."""
        if len(keys) >= BULK_KEYS_MIN and self._move_all(keys, route):
            moved += keys
            return
        source, free, pinned, takes_pinned = route
        pins = self._pins
        for key in keys:
            if takes_pinned or key not in pins:
                location = source.pop(key, None)
                if location is not None:
                    target = pinned if key in pins else free
                    if target is None:
                        self.space.give(location)
                    else:
                        target[key] = location
                    moved.append(key)
                    continue
            self._apply(key, event)

    def _move_all(self, keys: Sequence[bytes], route: Route) -> bool:
        """Like ``_move``, for all these chunks at once. Returns ``False`` and does nothing if a
        chunk is not in the route's source or is named twice, or if the chunks have different
        targets."""
        source, target, pinned, _ = route
        if target is not pinned and self._pins and not self._pins.keys().isdisjoint(keys):
            return False
        locations: list[int | None] = list(map(source.pop, keys, repeat(None)))
        if None in locations:
            source.update((k, at) for k, at in zip(keys, locations, strict=True) if at is not None)
            return False
        if target is not None:
            target.update(zip(keys, locations, strict=True))  # type: ignore[arg-type]  # there is no None
        else:
            self.space.give_all(locations)  # type: ignore[arg-type]  # there is no None
        return True

    def _refuse(self, key: bytes, event: ChunkEvent) -> NoReturn:
        raise InvariantError(
            f"index {self.name}: {event.value} of {key.hex()[:16]} in state "
            f"{self.state(key).value} with {self._pins.get(key, 0)} pins"
        )

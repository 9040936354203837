"""The index of one tier: which chunks it holds, in which state, at which place.

Pure and synchronous. The index owns states, pins and places; the eviction policy only orders
the resident keys. Two dicts describe a resident chunk (ours and the policy's), nothing else does,
because a disk tier may hold ten million of them; pins and the rarer states live beside.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import filterfalse, islice, repeat
from typing import NoReturn

from offload.errors import InvariantError
from offload.index.capacity import Capacity, Reservation
from offload.index.chunk_batch import sizes_of
from offload.index.retention import PASSED_MAX, Evictable
from offload.index.states import ChunkEvent, ChunkState
from offload.telemetry.removed_chunks import RemovalLog
from policies.base import EntryInfo, EvictionPolicy, RemoveCause
from policies.guarded import contained

_NOTHING: frozenset[bytes] = frozenset()
MANY = 16
"""From so many keys on it pays to look at them all before they are changed all at once."""


class TierIndex:
    """States and places of one tier's chunks. A policy that is not our LRU is watched: one that
    raises, dawdles or names keys that it must not is replaced by LRU (``policies.guarded``).

    ``low_watermark`` < 1 makes eviction run ahead: once the tier is full it is emptied to this
    share of its capacity, so that a disk has free places before it needs them.
    """

    def __init__(
        self, name: str, space: Capacity, policy: EvictionPolicy, low_watermark: float = 1.0
    ) -> None:
        self.name = name
        self.space = space
        self.evictions = 0
        # Not to be evicted, but dropped like any other: what clients keep, what loads wait for.
        self.kept: Container[bytes] = _NOTHING
        self.held: Container[bytes] = _NOTHING
        self.removals = RemovalLog()
        self._low = int(space.capacity * low_watermark)
        self._resident: dict[bytes, int] = {}  # always this one: the policy's guard looks into it
        self.policy = contained(policy, name, self._resident)
        self._filling: dict[bytes, int] = {}
        self._doomed: dict[bytes, int] = {}
        self._infos: dict[bytes, EntryInfo] = {}
        self._pins: Counter[bytes] = Counter()

    # -- questions ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: object) -> bool:
        return key in self._resident

    @property
    def resident(self) -> Mapping[bytes, int]:
        """The places of the keys that can be hit, for questions about many at once."""
        return self._resident

    def some(self, count: int) -> tuple[bytes, ...]:
        """Up to ``count`` resident keys, whichever."""
        return tuple(islice(self._resident, count))

    @property
    def filling_count(self) -> int:
        """How many chunks are being written."""
        return len(self._filling)

    def is_pinned(self, key: bytes) -> bool:
        """Whether a job uses this chunk now, or is about to."""
        return key in self._pins or key in self.held

    def is_filling(self, key: bytes) -> bool:
        """Whether a job is writing this chunk now."""
        return key in self._filling

    @property
    def barred(self) -> tuple[Mapping[bytes, int], ...]:
        """What is not resident and cannot be reserved all the same."""
        return tuple(filter(None, (self._filling, self._doomed)))

    def filling_among(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of ``keys`` that a job is writing now."""
        return set(filter(self._filling.__contains__, keys)) if self._filling else set()

    def are_absent(self, keys: Collection[bytes]) -> bool:
        """Whether all these chunks could be reserved."""
        return all(state.keys().isdisjoint(keys) for state in (self._resident, *self.barred))

    def is_absent(self, key: bytes) -> bool:
        """Whether the chunk could be reserved."""
        return not (key in self._resident or key in self._filling or key in self._doomed)

    def place(self, key: bytes) -> int:
        """Where a resident or filling chunk lies."""
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
        protect: Container[bytes] = _NOTHING,
        *,
        evict: bool = True,
        remember: bool = True,
    ) -> Reservation:
        """ABSENT -> FILLING for a prefix of ``keys``, evicting what the policy names.

        ``protect`` are keys that must not be evicted for this; with ``evict`` false none is. Unless
        the infos are remembered here, ``commit`` has to be told them.
        Stops at the first key that finds no place, so the granted keys are never a prefix with
        a hole.
        """
        evicted: list[bytes] = []
        sizes = sizes_of(infos)
        granted = self._reserve_at_once(keys, sizes, protect if evict else None, evicted)
        if granted is None:
            granted, take = [], self.space.take
            for key, size in zip(keys, sizes, strict=True):
                if not self.is_absent(key):
                    self._refuse(key, ChunkEvent.RESERVE)
                place = take(size)
                if place is None and evict:
                    evicted += self._make_room(self.space.missing(size), protect)
                    place = take(size)
                if place is None:
                    break
                self._filling[key] = place
                granted.append(place)
        if remember:
            self._infos.update(zip(keys, infos[: len(granted)], strict=False))
        return Reservation(tuple(granted), tuple(evicted))

    def _reserve_at_once(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        protect: Container[bytes] | None,
        evicted: list[bytes],
    ) -> Sequence[int] | None:
        """Many keys, if all are absent; ``None``: none was. No ``protect``: nothing is evicted."""
        if len(keys) < MANY or not self.are_absent(keys):
            return None
        places = self.space.take_all(sizes)
        if places is None and protect is not None:
            evicted += self._make_room(self.space.missing_all(sizes), protect)
            places = self.space.take_all(sizes)
        if places is None:
            places = self.space.take_some(sizes)
            keys = keys[: len(places)]
        filling, before = self._filling, len(self._filling)
        filling.update(zip(keys, places, strict=True))
        if len(filling) < before + len(keys):  # one is named twice
            deque(map(filling.pop, keys, repeat(None)), maxlen=0)
            self.space.give_all(places)
            return None
        return places

    def commit(
        self, keys: Sequence[bytes], infos: Sequence[EntryInfo] | None = None
    ) -> list[bytes]:
        """FILLING -> RESIDENT. Keys doomed meanwhile become ABSENT; returns the others.

        ``keys`` are in prefix order; the head ends up youngest. ``infos``: if not remembered.
        """
        if len(keys) >= MANY and self._commit_at_once(keys[::-1], infos):
            return list(keys)
        kept: list[bytes] = []
        resident, filling, doomed = self._resident, self._filling, self._doomed
        told = self._infos if infos is None else dict(zip(keys, infos, strict=True))
        try:
            for key in reversed(keys):
                if key in doomed:
                    self._let_go(key, ChunkEvent.COMMIT)
                    continue
                place = filling.pop(key, None)
                if place is None:
                    self._refuse(key, ChunkEvent.COMMIT)
                resident[key] = place
                kept.append(key)
        finally:  # what is resident is known to the policy, whatever was wrong with another
            self.policy.insert_all(kept, list(map(told.pop, kept)))
        kept.reverse()
        return kept

    def _commit_at_once(
        self, backwards: Sequence[bytes], infos: Sequence[EntryInfo] | None
    ) -> bool:
        """All of these, if all are FILLING; ``False``: nothing was done."""
        filling = self._filling
        places = list(map(filling.pop, backwards, repeat(None)))
        if None in places:  # or one is named twice
            filling.update({k: p for k, p in zip(backwards, places, strict=True) if p is not None})
            return False
        self._resident.update(zip(backwards, places, strict=True))  # type: ignore[arg-type]  # there is no None
        told = list(map(self._infos.pop, backwards)) if infos is None else infos[::-1]
        self.policy.insert_all(backwards, told)
        return True

    def abort(self, keys: Iterable[bytes]) -> None:
        """FILLING -> ABSENT (DOOMED while other jobs still pin the chunk)."""
        self.removals.note(keys := list(keys))  # somebody may have counted on them
        for key in keys:
            if key in self._doomed:
                self._let_go(key, ChunkEvent.ABORT)
                continue
            place = self._filling.pop(key, None)
            if place is None:
                self._refuse(key, ChunkEvent.ABORT)
            self._infos.pop(key, None)
            if key in self._pins:
                self._doomed[key] = place
            else:
                self.space.give(place)

    def recover(self, keys: Sequence[bytes], infos: Sequence[EntryInfo]) -> list[bytes]:
        """Enter chunks found after a restart, oldest first; returns those that did not fit."""
        sizes = sizes_of(infos)
        if len(keys) == len(sizes) > 0 and sizes.count(sizes[0]) == len(sizes):
            places = dict.fromkeys(keys, sizes[0])  # in half the time
        else:
            places = dict(zip(keys, sizes, strict=True))
        is_plain = not (self._resident or self._filling or self._doomed)
        if is_plain and len(places) == len(keys) and self.space.take_bytes(sum(sizes)):
            self._resident.update(places)
            self.policy.insert_all(places, infos)  # which keeps them: millions are not copied again
            return []
        rejected = []
        for key, info in zip(keys, infos, strict=True):
            place = self.space.take(info.size_bytes) if self.is_absent(key) else None
            if place is None:
                rejected.append(key)
                continue
            self._resident[key] = place
            self.policy.insert(key, info)
        return rejected

    # -- using -------------------------------------------------------------------------------

    def pin(self, keys: Collection[bytes]) -> None:
        """Keep RESIDENT or FILLING chunks where they are until unpinned as often."""
        for key in filterfalse(self._resident.__contains__, keys):
            if key not in self._filling:
                self._refuse(key, ChunkEvent.PIN)
        self._pins.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one ``pin`` per key; a DOOMED chunk's place is freed by the last one."""
        pins, doomed, keys = self._pins, self._doomed, list(keys)
        if len(keys) >= MANY and not doomed:
            counts = list(map(pins.pop, keys, repeat(0)))
            if counts.count(1) == len(keys):
                return
            pins.update({key: n for key, n in zip(keys, counts, strict=True) if n})
        for key in keys:
            count = pins.get(key, 0)
            if key in doomed:
                self._let_go(key, ChunkEvent.UNPIN)
            elif count == 1:
                pins.pop(key)
            elif count == 0:
                self._refuse(key, ChunkEvent.UNPIN)
            else:
                pins[key] = count - 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note one request's use of these keys, in prefix order; absent ones are ignored."""
        self.policy.touch(keys)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget chunks; nobody can hit them from now on. Returns those that were resident."""
        dropped: list[bytes] = []
        for key in keys:
            place = self._resident.pop(key, None)
            if place is not None:
                self.policy.remove(key, RemoveCause.DROPPED)
                dropped.append(key)
                if key in self._pins:
                    self._doomed[key] = place
                else:
                    self.space.give(place)
            elif key in self._filling:
                self._doom_filling(key)
        self.removals.note(dropped)
        return dropped

    def evict(self, count_bytes: int) -> list[bytes]:
        """Evict by policy until ``used`` has fallen by this much or nothing more can go."""
        return self._make_room(count_bytes, _NOTHING)

    def clear(self) -> None:
        """Forget every chunk at once; what jobs still use stays DOOMED until they let go."""
        for key in self._pins.keys() & self._resident.keys():
            self._doomed[key] = self._resident.pop(key)
        self.space.give_all(self._resident.values())
        self._resident.clear()
        self.removals.note_all()
        self.policy.clear()
        for key in list(self._filling):
            self._doom_filling(key)

    def check(self) -> None:
        """Verify the invariants; raises ``InvariantError``. O(n), for tests and debug mode."""
        places = [*self._resident.values(), *self._filling.values(), *self._doomed.values()]
        used = sum(self.space.amount(place) for place in places)
        problems = []
        if used != self.space.used or used > self.space.capacity:
            problems.append(f"places {used}, used {self.space.used} of {self.space.capacity}")
        if (known := len(self.policy)) != len(self):
            problems.append(f"policy {known} keys, resident {len(self)}")
        states = [set(self._resident), set(self._filling), set(self._doomed)]
        if sum(map(len, states)) != len(set.union(*states)):
            problems.append("a key is in two states")
        if not set(self._infos) <= set(self._filling):
            problems.append("infos of keys that are not filling")
        if not set(self._pins) <= set.union(*states):
            problems.append("a pinned key is absent")
        if not set(self._doomed) <= set(self._pins):
            problems.append("a doomed key is not pinned")
        if problems:
            raise InvariantError(f"index {self.name}: " + "; ".join(problems))

    # -- inside ------------------------------------------------------------------------------

    def _make_room(self, missing: int, protect: Container[bytes]) -> list[bytes]:
        """Evict so much, ahead to the low watermark, never more than needed there."""
        space, evictable = self.space, Evictable(self.kept, self._pins, protect, self.held)
        if missing and self._low < space.capacity:
            missing = max(missing, space.used - self._low)
        evicted, freed = list[bytes](), 0
        while freed < missing:
            per_key = max(1, space.used // max(1, len(self) + len(self._filling)))
            names = self.policy.victims(
                max(1, (missing - freed + per_key - 1) // per_key), evictable
            )
            if not names:
                break
            freed += self._evict(names)  # type: ignore[arg-type]  # policies see Hashable
            evicted += names  # type: ignore[arg-type]  # policies see Hashable
        if len(evictable.passed) > PASSED_MAX and self.policy.takes_parts:
            self.policy.touch(evictable.passed[::-1])  # or each eviction would pass them by again
        return evicted

    def _evict(self, keys: Sequence[bytes]) -> int:
        """RESIDENT -> ABSENT; how much that has freed."""
        pins, resident = self._pins, self._resident
        are_free = pins.keys().isdisjoint(keys)
        places = list(map(resident.pop, keys, repeat(None))) if are_free else []
        if not are_free or None in places:  # or named twice
            resident.update((k, p) for k, p in zip(keys, places, strict=False) if p is not None)
            wrong = (key for key in keys if key in pins or key not in resident)
            self._refuse(next(wrong, keys[0]), ChunkEvent.EVICT)
        used = self.space.used
        self.space.give_all(places)  # type: ignore[arg-type]  # there is no None
        self.policy.remove_all(keys, RemoveCause.EVICTED)
        self.evictions += len(keys)
        self.removals.note(keys)
        return used - self.space.used

    def _doom_filling(self, key: bytes) -> None:
        """The job that fills the chunk counts as one more pin from here on."""
        self._doomed[key] = self._filling.pop(key)
        self._infos.pop(key, None)
        self._pins[key] = self._pins.get(key, 0) + 1

    def _let_go(self, key: bytes, event: ChunkEvent) -> None:
        count = self._pins.get(key, 0)
        if count == 0:
            self._refuse(key, event)
        if count > 1:
            self._pins[key] = count - 1
            return
        self._pins.pop(key)
        self.space.give(self._doomed.pop(key))

    def _refuse(self, key: bytes, event: ChunkEvent) -> NoReturn:
        raise InvariantError(
            f"index {self.name}: {event.value} of {key.hex()[:16]} in state "
            f"{self.state(key).value} with {self._pins.get(key, 0)} pins"
        )

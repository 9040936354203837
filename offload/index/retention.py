"""Tracks which chunks of a tier must not be evicted now, and which chunks still wait to be written;
provides the check that policies call.

Half of a tier may be pinned, or wanted by waiting requests. A policy looks for victims from the
start of its order each time, so it would test thousands of such keys to evict a few chunks. No
policy has to know about this: once a search had to pass many keys, the tier asks for more victims
than it needs, and uses the others in its next evictions (``NamedVictims``).
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from itertools import filterfalse, islice

from policies.base import EvictionPolicy

NOTHING: frozenset[bytes] = frozenset()
PASSED_PER_VICTIM = 8
"""A search that passes more than about this number of other keys per victim names more victims."""


class Evict(enum.Enum):
    """The chunks that may be evicted to make space for others.

    ``WRITTEN``: eviction stops at the first victim that waits to be written to a lower tier.
    """

    NOTHING = "nothing"
    WRITTEN = "written"
    ANYTHING = "anything"


class Retention:
    """The chunks of one tier that must not be evicted. Owned by the tier's index.

    ``pins`` are the chunks that jobs use; the index changes them. The ``register_`` methods add
    containers that their owners change: a chunk must stay as long as it is in one of them. Such a
    chunk can still be dropped if it is damaged or the weights change. Chunks that waiting requests
    want (``wanted``) can be evicted, but are evicted last.
    """

    def __init__(self, pins: Container[bytes] = NOTHING) -> None:
        self._pins = pins
        self._client_pins: Collection[bytes] = NOTHING
        self._held: Container[bytes] = NOTHING
        self._ahead: Container[bytes] = NOTHING
        self.wanted: Collection[bytes] = NOTHING

    def register_client_pins(self, keys: Collection[bytes]) -> None:
        """Retain the chunks in this container: clients have pinned them."""
        self._client_pins = keys

    @property
    def client_pinned(self) -> int:
        """The number of chunks that clients have pinned."""
        return len(self._client_pins)

    def register_load_holds(self, keys: Container[bytes]) -> None:
        """Retain the chunks in this container: loads are about to use them."""
        self._held = keys

    def register_ahead(self, read: Container[bytes], wanted: Collection[bytes]) -> None:
        """Retain the chunks that were ``read`` ahead; spare those that are ``wanted``."""
        self._ahead, self.wanted = read, wanted

    def is_in_use(self, key: bytes) -> bool:
        """True if a job uses this chunk now, or soon will."""
        return key in self._pins or key in self._held

    def evictable(self, protect: Container[bytes], *, spare: bool = True) -> Evictable:
        """The test for one eviction, which must not evict the keys of ``protect`` and, if
        ``spare``, those that waiting requests want."""
        wanted = self.wanted if spare else NOTHING
        return Evictable(self._client_pins, self._pins, protect, self._held, self._ahead, wanted)


class Evictable:
    """The test that a policy applies while it chooses victims; used for one eviction.

    Keys in any of ``others`` must stay. ``passed`` counts the tests of keys that must stay.
    """

    def __init__(self, *others: Container[bytes]) -> None:
        self.passed = 0
        self._others = [other for other in others if other]

    def __call__(self, key: Hashable) -> bool:
        stays = any(key in other for other in self._others)
        self.passed += stays
        return not stays

    def among(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
        """The keys that may be evicted. Avoids a Python call per key, because a slow tier keeps
        thousands of chunks pinned."""
        free = keys
        for names in self._others:
            if _holds_any(names, free):
                free = list(filterfalse(names.__contains__, free))
        self.passed += len(keys) - len(free)
        return free


def _holds_any(names: Container[bytes], keys: Sequence[Hashable]) -> bool:
    names = names.keys() if isinstance(names, dict) else names
    isdisjoint = getattr(names, "isdisjoint", None)
    if isdisjoint is not None:
        return not isdisjoint(keys)
    return any(map(names.__contains__, keys))


class NamedVictims:
    """The victims of one tier that its policy has named and that were not needed yet. Owned by the
    tier's index.

    The index calls ``forget`` for keys that were used or have left the tier, because their position
    in the policy's order has changed. At most a sixteenth of the tier is named ahead, so the policy
    would rarely choose other victims by now.
    """

    def __init__(self) -> None:
        self._named: dict[Hashable, None] = {}
        self._passed = 0  # number of keys that the policy's latest search passed

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._named)

    def choose(self, policy: EvictionPolicy, count: int, evictable: Evictable) -> list[Hashable]:
        """Return 1 to ``count`` keys for which ``evictable`` is true, in the order in which to
        evict them, or none if there are none."""
        while self._named:
            some = list(islice(self._named, count))
            free = evictable.among(some)
            if len(free) < len(some):
                self.forget(set(some).difference(free))
            if free:
                return list(free)
        passed = min(self._passed, len(policy) // 2)
        before, wanted = evictable.passed, max(count, passed // PASSED_PER_VICTIM)
        named = policy.victims(wanted, evictable)
        self._passed = evictable.passed - before
        if len(named) > count:
            self._named = dict.fromkeys(named)
        return named[:count]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Remove keys that were used or have left the tier."""
        if self._named:
            for key in keys:
                self._named.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._named.clear()
        self._passed = 0


class UnwrittenChunks:
    """The resident chunks that wait to be written to any lower tier. Owned by the CPU tier's index.

    Such a chunk can be evicted like any other, but then its write is cancelled. The queue of each
    lower tier adds and takes the chunks of that tier; the index removes chunks that leave it.
    ``given_up`` counts the cancelled writes by tier; ``gave_up`` says that one was cancelled in the
    current step. ``is_behind`` means that writes were cancelled and that the disks have not yet
    written everything that waits: until they have, no store waits for them.
    """

    def __init__(self) -> None:
        self.gave_up = self.is_behind = False
        self.given_up: Counter[int] = Counter()
        self._tiers: defaultdict[int, set[bytes]] = defaultdict(set)

    def add(self, tier: int, keys: Iterable[bytes]) -> None:
        """Record that these chunks wait for this tier from now on."""
        self._tiers[tier].update(keys)

    def take(self, tier: int, keys: Iterable[bytes]) -> set[bytes]:
        """Remove these chunks from those that wait for this tier; return those that did wait."""
        waiting = self._tiers[tier]
        taken = waiting.intersection(keys)
        waiting -= taken
        return taken

    def forget(self, tier: int) -> None:
        """Record that no chunk waits for this tier any more."""
        self._tiers[tier].clear()

    def count(self, tier: int) -> int:
        """The number of chunks that wait for this tier."""
        return len(self._tiers[tier])

    def flags(self, tier: int, keys: Iterable[bytes]) -> list[bool]:
        """For each of these chunks, whether it waits for this tier."""
        return list(map(self._tiers[tier].__contains__, keys))

    def __len__(self) -> int:
        """An upper bound of the number of chunks that wait: a chunk that waits for two tiers counts
        twice."""
        return sum(map(len, self._tiers.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in waiting for waiting in self._tiers.values())

    def isdisjoint(self, keys: Collection[Hashable]) -> bool:
        """True if none of these keys waits."""
        return all(waiting.isdisjoint(keys) for waiting in self._tiers.values())

    @property
    def evict_for_reads(self) -> Evict:
        """The chunks that reads into the CPU tier may evict: while the disks keep up, none that
        waits to be written."""
        return Evict.ANYTHING if self.is_behind else Evict.WRITTEN

    def before_first(self, keys: Sequence[Hashable]) -> Sequence[Hashable]:
        """The keys before the first key that waits."""
        if self.isdisjoint(keys):
            return keys
        return keys[: next(at for at, key in enumerate(keys) if key in self)]

    def discard(self, keys: Sequence[bytes]) -> None:
        """Record that these chunks were dropped from the CPU tier, so they need not be written any
        more."""
        for waiting in self._tiers.values():
            waiting.difference_update(keys)

    def clear(self) -> None:
        """Record that the CPU tier has forgotten every chunk."""
        for waiting in self._tiers.values():
            waiting.clear()

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Record that these chunks were evicted: they cannot be written any more."""
        for tier, waiting in self._tiers.items():
            before = len(waiting)
            waiting.difference_update(keys)
            self.given_up[tier] += before - len(waiting)
            self.gave_up = self.gave_up or len(waiting) < before

    def end_step(self, unwritten: int) -> None:
        """End the step: ``unwritten`` chunks wait for a lower tier or are being written."""
        self.is_behind = unwritten > 0 and (self.is_behind or self.gave_up)
        self.gave_up = False

"""The interface of eviction and admission policies.

A policy orders keys. It owns no slots, pins or bytes: the index asks it for victims, decides which
of them to evict, and then calls ``remove``. Policies are synchronous, single-threaded, and
deterministic given their options; no call may take more than O(log n) per key.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

Key = Hashable
"""Identifies a chunk of one tier. Policies only compare keys for equality and never look inside."""

_BATCH_MIN, _BATCH_MAX = 16, 1024
"""Number of keys that ``free_in`` tests at a time."""
NO_HINTS: Mapping[str, Any] = MappingProxyType({})


class RemoveCause(enum.Enum):
    """The reason why a key left the tier: ghost lists remember only what was ``EVICTED``."""

    EVICTED = "evicted"
    DROPPED = "dropped"


class EntryInfo(NamedTuple):
    """The facts about a chunk that a policy may use.

    ``kind`` is the group's restore rule (``full``, ``window`` or ``state``); ``depth_tokens`` is
    the token position at which the chunk ends in its prefix; ``cost`` is the cost of recomputing it
    in any fixed unit (0 = unknown); ``salt`` is a digest of the tenant's cache salt; ``hints`` come
    from the client or from observation. A policy may ignore any hint.
    """

    group: int = 0
    kind: str = "full"
    depth_tokens: int = 0
    size_bytes: int = 1
    cost: float = 0.0
    salt: bytes = b""
    hints: Mapping[str, Any] = NO_HINTS


def free_among(evictable: Callable[[Key], bool], keys: Sequence[Key]) -> Sequence[Key]:
    """Return the evictable keys among ``keys``. If ``evictable`` has a method ``among(keys)``, one
    call of it replaces a call per key."""
    among: Callable[[Sequence[Key]], Sequence[Key]] | None = getattr(evictable, "among", None)
    return among(keys) if among is not None else list(filter(evictable, keys))


def free_in(order: Iterable[Key], evictable: Callable[[Key], bool]) -> Iterator[Key]:
    """Yield the evictable keys of ``order``. Tests them in batches that grow, because thousands of
    keys that must stay may come first."""
    keys, size = iter(order), _BATCH_MIN
    while some := list(islice(keys, size)):
        yield from free_among(evictable, some)
        size = min(2 * size, _BATCH_MAX)


def hints_among(infos: Sequence[EntryInfo]) -> Iterable[Mapping[str, Any]]:
    """Return the hints of ``infos``, without empty ones. If ``infos`` has a method ``hints()``, one
    call of it replaces an access to each."""
    hints: Callable[[], Iterable[Mapping[str, Any]]] | None = getattr(infos, "hints", None)
    return hints() if hints is not None else filter(None, map(attrgetter("hints"), infos))


class EvictionPolicy(ABC):
    """Orders the keys of one tier. Its members are always the keys that are resident in the
    tier."""

    keeps_prefixes_closed: bool = False
    """True if the policy guarantees: if a chunk is a member, all chunks before it in its prefix are
    members, too."""
    takes_parts: bool = False
    """True if one request's use may be reported in several touches, last keys first. This lets the
    caller spread the work for a long request over several steps."""

    def __init_subclass__(cls) -> None:
        """If a subclass overrides ``insert`` but not ``insert_all`` (or ``remove`` but not
        ``remove_all``), replace the inherited bulk method by one that calls the override per
        key."""
        for one, many in (("insert", "insert_all"), ("remove", "remove_all")):
            first = next(c for c in cls.__mro__ if {one, many} & vars(c).keys())
            if many not in vars(first):
                setattr(cls, many, getattr(EvictionPolicy, many))

    @abstractmethod
    def insert(self, key: Key, info: EntryInfo) -> None:
        """Add a key that is not a member."""

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        """Insert many keys, one after the other. After a restart ``keys`` is a dict, which the
        policy may keep and modify. Override this if inserting many keys at once is faster."""
        for key, info in zip(keys, infos, strict=True):
            self.insert(key, info)

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """Record one request's use of these keys, given in prefix order (head first).

        The policy ignores keys that are not members; a key may occur twice. The first touch of a
        key after its insertion is by the request that inserted it: it orders the key and does not
        count as a reuse.
        """

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:  # noqa: B027  # optional on purpose
        """Receive the hints of a request that has ended. ``keys`` are its keys in prefix order.

        ``policies.hints`` lists the names. The default implementation ignores hints. Ignore keys
        that are not members.
        """

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        """Return at most ``count`` distinct members for which ``evictable`` is true, in the order
        in which to evict them.

        They stay members until the caller calls ``remove``. A tier in which many keys have to stay
        asks for more keys than it evicts at once; it evicts the others later, unless they are used
        first.
        """

    @abstractmethod
    def remove(self, key: Key, cause: RemoveCause) -> None:
        """Remove a member; ignore an unknown key."""

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        """Remove many members, one after the other. Override this if removing many keys at once is
        faster."""
        for key in keys:
            self.remove(key, cause)

    def use_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027  # optional on purpose
        """Use ``clock``, which returns monotonic seconds, as the source of time; the simulator
        passes simulated time. Override this in a policy that depends on time. The default ignores
        it."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all members and all history."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of members."""


class AdmissionPolicy(ABC):
    """Decides whether a chunk that was just computed may enter a tier."""

    @abstractmethod
    def admit(self, key: Key, info: EntryInfo) -> bool:
        """Return True if the tier should store this key now. The policy may count the attempt."""

    def use_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027  # optional on purpose
        """Use ``clock`` for the time, as in ``EvictionPolicy.use_clock``."""

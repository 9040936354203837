"""The interface of eviction and admission policies.

A policy orders keys. It never owns slots, pins or bytes: the index asks for victims, decides,
and then calls ``remove``. Policies are synchronous, single-threaded, and deterministic given
their options; no call may take more than O(log n) per key.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

Key = Hashable
"""A chunk of one tier, equal only to itself. Policies compare keys and never look inside."""

NO_HINTS: Mapping[str, Any] = MappingProxyType({})


class RemoveCause(enum.Enum):
    """Why a key left the tier. Ghost lists of adaptive policies care only about ``EVICTED``."""

    EVICTED = "evicted"
    DROPPED = "dropped"


class EntryInfo(NamedTuple):
    """What a policy may know of a chunk.

    ``kind`` is the group's restore rule (``full``, ``window`` or ``state``); ``depth_tokens`` is
    the token position at which the chunk ends in its prefix; ``cost`` is the cost of recomputing
    it in any fixed unit (0 = unknown); ``salt`` digests the tenant's cache salt; ``hints`` come
    from the client or are observed. Every hint may be ignored.
    """

    group: int = 0
    kind: str = "full"
    depth_tokens: int = 0
    size_bytes: int = 1
    cost: float = 0.0
    salt: bytes = b""
    hints: Mapping[str, Any] = NO_HINTS


def free_among(evictable: Callable[[Key], bool], keys: Sequence[Key]) -> Sequence[Key]:
    """Those of these keys that are evictable: asked at once, which is faster, where ``evictable``
    has a method ``among(keys)``."""
    among: Callable[[Sequence[Key]], Sequence[Key]] | None = getattr(evictable, "among", None)
    return among(keys) if among is not None else list(filter(evictable, keys))


def hints_among(infos: Sequence[EntryInfo]) -> Iterable[Mapping[str, Any]]:
    """The hints of these, without empty ones: asked at once, which is faster, where ``infos`` has
    a method ``hints()``."""
    hints: Callable[[], Iterable[Mapping[str, Any]]] | None = getattr(infos, "hints", None)
    return hints() if hints is not None else filter(None, map(attrgetter("hints"), infos))


class EvictionPolicy(ABC):
    """Orders the keys of one tier. Membership equals the tier's resident keys."""

    keeps_prefixes_closed: bool = False
    """Promise: if a chunk is a member, all chunks before it in its prefix are members too."""
    takes_parts: bool = False
    """One request's use may be noted by several touches, the last keys first: it makes no
    difference to the policy, and spreads the work for a long request over several steps."""

    def __init_subclass__(cls) -> None:
        """Who overrides ``insert`` or ``remove`` of a policy that is faster with many keys at
        once, and not that as well, gets every key one by one."""
        for one, many in (("insert", "insert_all"), ("remove", "remove_all")):
            first = next(c for c in cls.__mro__ if {one, many} & vars(c).keys())
            if many not in vars(first):
                setattr(cls, many, getattr(EvictionPolicy, many))

    @abstractmethod
    def insert(self, key: Key, info: EntryInfo) -> None:
        """Add a key that is not a member."""

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        """Insert many keys one after the other: from a list, or after a restart from a dict in its
        order, which is the policy's from then on. Overridden where that is faster at once."""
        for key, info in zip(keys, infos, strict=True):
            self.insert(key, info)

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """Note one request's use of these keys, given in prefix order (head first).

        Keys that are not members are ignored; a key may be named twice. The first touch of a key
        after its insertion belongs to the insertion: it orders the key and counts as no reuse.
        """

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:  # noqa: B027  # optional on purpose
        """Take in what is known of one request when it ends: its keys, in prefix order.

        The names are those of ``EntryInfo.hints`` (``policies.hints`` lists them). Does nothing
        unless a policy overrides it; keys that are not members are ignored.
        """

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        """At most ``count`` distinct members for which ``evictable`` holds, worst first.

        Membership is unchanged: the caller removes what it really evicts.
        """

    @abstractmethod
    def remove(self, key: Key, cause: RemoveCause) -> None:
        """Take a member out; unknown keys are ignored."""

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        """Take many members out, one after the other. Overridden where that is faster at once."""
        for key in keys:
            self.remove(key, cause)

    def use_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027  # optional on purpose
        """Take the time from ``clock``, which returns monotonic seconds: the simulator's. Override
        it in a policy that depends on the time; others ignore it."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all members and all history."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of members."""


class AdmissionPolicy(ABC):
    """Decides whether a chunk that was just computed may enter a tier at all."""

    @abstractmethod
    def admit(self, key: Key, info: EntryInfo) -> bool:
        """Whether to store this key now. May count the attempt."""

    def use_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027  # optional on purpose
        """Take the time from ``clock``, as ``EvictionPolicy.use_clock`` does."""

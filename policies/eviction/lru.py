"""Least recently used, touched tail to head.

A request's keys are moved to the young end from the last one to the first one, so that the head of
a prefix is always younger than its tail: eviction is deepest-first and the cache stays
prefix-closed (like the leaf LRU of a radix tree, at the cost of a dict).

The policy keeps keys in parts: lists of keys that were used together, in order of use. A dict maps
a key to the part in which it was used last; its entries in older parts are stale. To move many
keys, the policy makes a list and updates a dict. This takes a fifth of the time of moving them one
by one in an ``OrderedDict``, and needs no node per key. Stale entries are removed when they reach
the old end, and gradually when they outnumber the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, compress, count, islice, repeat
from operator import is_, is_not
from typing import Any

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_among

PART_MAX = 512
PART_MIN = 32
"""Fewer keys than this are added to the youngest part if that, too, began with fewer."""
STALE_PER_MEMBER = 2
STALE_MIN = 4096
"""Maximum number of stale entries: ``STALE_PER_MEMBER`` per member, plus ``STALE_MIN``."""
PART_ENTRIES = 8
"""Memory of a part without its keys, as a number of entries."""
PASSED_MAX = 1024
"""Maximum number of stale entries that may follow a pinned key at the old end. Without a limit,
each search for victims would walk over the entries of all evicted keys."""


class _Part(list[Key]):
    """Keys in order of use, oldest first; some entries may be stale. Compared by identity."""

    __slots__ = ()


class LruPolicy(EvictionPolicy):
    """Evicts the least recently used key. All operations are O(1) per key, amortised.

    Keys recovered after a restart come before the parts, as one list in order of use. They need no
    part, which saves time and memory, and the policy walks the list only once.
    """

    keeps_prefixes_closed = True
    takes_parts = True

    def __init__(self) -> None:
        # the part of each member; the values of recovered keys not used since are no parts
        self._part_of: dict[Key, Any] = {}
        self._parts: deque[_Part] = deque()
        # all keys of the youngest part, if a few more may be added to it
        self._open: set[Key] = set()
        self._entries = 0  # number of entries in all parts
        self._swept = 0  # the next part to check for removed keys
        self._found_order: list[Key] = []
        self._gone = 0  # stale entries at the front of that list
        self._looked = 0  # number of entries in the parts that the last search has visited

    def insert(self, key: Key, info: EntryInfo) -> None:
        if not 0 < len(self._open) < PART_MAX or key in self._open:
            self._append([key])
            return
        part = self._parts[-1]
        part.append(key)
        self._open.add(key)
        self._part_of[key] = part
        self._placed(1)

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        if self or not isinstance(keys, dict):
            self._append(list(keys))
            return
        self.clear()
        self._part_of, self._found_order = keys, list(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        members = list(compress(keys, map(self._part_of.__contains__, keys)))
        self._append(members[::-1])

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        self._forget_oldest()
        found: list[Key] = []
        order, most, seen = self._in_order(), count, 0
        if count == 1 and self._parts and not self._found_order:
            if evictable(self._parts[0][0]):
                return self._parts[0][:1]
            next(order)  # the caller has already checked this one
        while len(found) < count and (some := list(islice(order, most))):
            seen += len(some)
            found += free_among(evictable, some)
            most = max(count, PART_MAX)  # there may be thousands of pinned keys
        if self._looked > 2 * seen + PASSED_MAX:
            self._tidy_oldest(self._looked)
        return found[:count]

    def remove(self, key: Key, cause: RemoveCause) -> None:
        self._part_of.pop(key, None)

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        pop = self._part_of.pop
        for key in keys:
            pop(key, None)

    def clear(self) -> None:
        self._part_of = {}
        self._parts.clear()
        self._open.clear()
        self._entries = self._swept = 0
        self._found_order, self._gone = [], 0

    def __len__(self) -> int:
        return len(self._part_of)

    # -- inside ------------------------------------------------------------------------------

    def _append(self, keys: list[Key]) -> None:
        """Make these keys the youngest; the last one is the youngest of all."""
        for first in range(0, len(keys), PART_MAX):
            some = keys[first : first + PART_MAX]
            is_few = len(some) < PART_MIN
            if is_few and 0 < len(self._open) < PART_MAX and self._open.isdisjoint(some):
                part = self._parts[-1]
            else:
                part = _Part()
                self._parts.append(part)
                self._open.clear()
            part_of = dict.fromkeys(some, part)
            if len(part_of) < len(some):  # a key occurs twice: its last position counts
                some = list(dict.fromkeys(some[::-1]))[::-1]
            part += some
            if is_few:
                self._open.update(some)
            self._part_of.update(part_of)
            self._placed(len(some))

    def _placed(self, count: int) -> None:
        """Count new entries. If too many are stale, remove some."""
        self._entries += count
        entries = self._entries + PART_ENTRIES * len(self._parts)
        if entries > (1 + STALE_PER_MEMBER) * len(self._part_of) + STALE_MIN:
            self._sweep(2 * count + PART_MIN)

    def _in_order(self) -> Iterator[Key]:
        """All members, oldest first."""
        self._looked = 0
        return chain.from_iterable(chain(self._found_parts(), self._used_parts()))

    def _used_parts(self) -> Iterator[Iterator[Key]]:
        """The members of each part."""
        for part in self._parts:
            self._looked += len(part)
            yield self._members(part)

    def _members(self, part: _Part) -> Iterator[Key]:
        """The keys of a part, without stale entries."""
        return compress(part, map(is_, map(self._part_of.get, part), repeat(part)))

    def _found_parts(self) -> Iterator[Iterator[Key]]:
        """The recovered keys that no request has used since the restart, oldest first."""
        order = self._found_order
        for first in range(self._gone, len(order), PART_MAX):
            some = order[first : first + PART_MAX]
            self._looked += len(some)
            yield self._found_members(some)

    def _found_members(self, some: list[Key]) -> Iterator[Key]:
        """The keys among ``some`` that were recovered and not used since the restart."""
        others = map(type, map(self._part_of.get, some, repeat(_GONE)))
        return compress(some, map(is_not, others, repeat(_Part)))

    def _forget_oldest(self) -> None:
        """Remove stale entries from the oldest parts, up to the first member."""
        order, get = self._found_order, self._part_of.get
        while self._gone < len(order) and isinstance(get(order[self._gone], _GONE), _Part):
            self._gone += 1
        if order and self._gone == len(order):
            self._found_order, self._gone = [], 0
        while self._parts:
            part = self._parts[0]
            are_members = map(is_, map(self._part_of.get, part), repeat(part))
            first = next(compress(count(), are_members), len(part))
            self._entries -= first
            del part[:first]
            if part:
                return
            self._parts.popleft()
            self._swept = max(0, self._swept - 1)
        self._open.clear()

    def _tidy_oldest(self, entries_max: int) -> None:
        """Remove about ``entries_max`` stale entries from the old end."""
        order, first = self._found_order, self._gone
        end = min(len(order), first + entries_max)
        kept = list(self._found_members(order[first:end]))
        self._gone = end - len(kept)
        order[self._gone : end] = kept
        swept, before = self._swept, len(self._parts)
        self._swept = 0
        self._sweep(entries_max - (end - first))
        self._swept = max(self._swept, swept - (before - len(self._parts)))

    def _sweep(self, entries_max: int) -> None:
        """Remove stale entries from the next parts, except the youngest, and join small parts.
        Checks about ``entries_max`` entries."""
        parts = self._parts
        while entries_max > 0 and len(parts) > 1:
            at = self._swept = self._swept if self._swept < len(parts) - 1 else 0
            part = parts[at]
            entries_max -= len(part) + 1
            self._keep_members(part)
            before = parts[at - 1] if at else None
            if part and (before is None or len(before) + len(part) > PART_MAX):
                self._swept += 1
                continue
            if before is not None:
                self._keep_members(before)  # a key must not occur twice in one part
                before += part
                self._part_of.update(dict.fromkeys(part, before))
            del parts[at]

    def _keep_members(self, part: _Part) -> None:
        kept = list(self._members(part))
        self._entries -= len(part) - len(kept)
        part[:] = kept


_GONE = _Part()

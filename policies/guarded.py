"""Contains a policy that misbehaves, so that it costs hits and never an answer.

The guard watches every call. A policy that raises (or calls ``sys.exit``), is slow, names keys
that it must not name or withholds victims is replaced for good by LRU over the same members; that
is counted, logged once and told to ``on_fault``. The guard never raises because of what the policy
did.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import filterfalse, repeat
from typing import Any

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause, free_among
from policies.eviction.lru import LruPolicy

logger = logging.getLogger(__name__)

_WINDOW_KEYS = 4096
"""The mean time per key is judged each time this many keys have passed."""
_MEMORY_KEYS = 1 << 17
"""Slowness is forgiven when this many keys have passed since."""


class GuardedPolicy(EvictionPolicy):
    """A policy in a cage.

    ``members`` is a live view of the tier's resident keys, from which a key is taken before
    ``remove`` and ``clear`` and to which it is added before ``insert``; without it the guard
    keeps a set of its own.
    ``call_budget_s`` bounds one call and ``key_budget_s`` both the mean time per key and, times
    the keys in it, adds to the bound of a long call. Wall time, because a policy may sleep. As a
    machine that stands still for a moment (a paused guest, a CPU quota, a garbage collection)
    looks the same, slowness is a fault only when it is seen ``patience`` times in a while.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        on_fault: Callable[[str], None] | None = None,
        *,
        members: Collection[Key] | None = None,
        call_budget_s: float = 0.25,
        key_budget_s: float = 100e-6,
        patience: int = 3,
        tier: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.faults: list[str] = []
        self._active: EvictionPolicy = policy
        self._name = type(policy).__name__ + (f" of tier {tier}" if tier else "")
        self._on_fault = on_fault
        self._own: dict[Key, None] | None = {} if members is None else None
        self._members: Collection[Key] = self._own if members is None else members  # type: ignore[assignment]  # one of the two is there
        self._call_budget_s = call_budget_s
        self._key_budget_s = key_budget_s
        self._patience = patience
        self._clock = clock
        self._spent_s = 0.0
        self._keys = 0
        self._passed = 0  # keys before the present window
        self._slow_at: deque[int] = deque(maxlen=patience)

    @property
    def active(self) -> EvictionPolicy:
        """The policy in charge: the guarded one, or LRU after a fault."""
        return self._active

    @property
    def keeps_prefixes_closed(self) -> bool:  # type: ignore[override]  # changes with a fault
        """The policy's promise; False after a fault, as LRU starts from any order there."""
        return not self.faults and self._active.keeps_prefixes_closed

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]  # changes with a fault
        """Whether the policy in charge does."""
        return self._active.takes_parts

    def insert(self, key: Key, info: EntryInfo) -> None:
        if self._own is not None:
            self._own[key] = None
        if self.faults:
            self._active.insert(key, info)
            return
        start = self._clock()
        try:
            self._active.insert(key, info)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"insert raised {error!r}")
            self._active.insert(key, info)
        else:
            self._charge("insert", start, 1)

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        if self._own is not None:
            self._own.update(dict.fromkeys(keys))
        if self.faults:
            self._active.insert_all(keys, infos)
            return
        start = self._clock()
        try:
            self._active.insert_all(keys, infos)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"insert_all raised {error!r}")  # which has these too
        else:
            self._charge("insert_all", start, len(keys))

    def touch(self, keys: Sequence[Key]) -> None:
        if self.faults:
            self._active.touch(keys)
            return
        start = self._clock()
        try:
            self._active.touch(keys)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"touch raised {error!r}")
            self._active.touch(keys)
        else:
            self._charge("touch", start, len(keys))

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        if self.faults:
            return
        start = self._clock()
        try:
            self._active.advise(keys, hints)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"advise raised {error!r}")
        else:
            self._charge("advise", start, len(keys))

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        if self.faults:
            return self._active.victims(count, evictable)
        start = self._clock()
        try:
            names = self._active.victims(count, evictable)
            spent_s = self._clock() - start  # without the guard's own look at the names
            fault = self._wrong(names, count, evictable)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            fault = f"victims raised {error!r}"
        if fault:
            self._fall_back(fault)
            return self._active.victims(count, evictable)
        self._book("victims", spent_s, count)
        return names

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._own is not None:
            self._own.pop(key, None)
        if self.faults:
            self._active.remove(key, cause)
            return
        start = self._clock()
        try:
            self._active.remove(key, cause)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"remove raised {error!r}")
            self._active.remove(key, cause)
        else:
            self._charge("remove", start, 1)

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        if self._own is not None:
            deque(map(self._own.pop, keys, repeat(None)), maxlen=0)
        if self.faults:
            self._active.remove_all(keys, cause)
            return
        start = self._clock()
        try:
            self._active.remove_all(keys, cause)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"remove_all raised {error!r}")  # which has these no more
        else:
            self._charge("remove_all", start, len(keys))

    def clear(self) -> None:
        if self._own is not None:
            self._own.clear()
        try:
            self._active.clear()
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"clear raised {error!r}")
            self._active.clear()

    def __len__(self) -> int:
        if self._own is not None:
            return len(self._own)
        try:
            return len(self._active)
        except (Exception, SystemExit) as error:  # containing it is this class's purpose
            self._fall_back(f"len raised {error!r}")
            return len(self._active)

    def _wrong(self, names: object, count: int, evictable: Callable[[Key], bool]) -> str:
        """What is wrong with these victims; empty if nothing is."""
        if not isinstance(names, list) or len(names) > count:
            return f"victims({count}) returned {_brief(names)}"
        if len(set(names)) != len(names):
            return "victims named a key twice"
        unknown = next(filterfalse(self._members.__contains__, names), None)
        if unknown is not None:
            return f"victims named an unknown key {_brief(unknown)}"
        free = free_among(evictable, names)
        if len(free) < len(names):
            pinned = next(filterfalse(set(free).__contains__, names))
            return f"victims named a pinned key {_brief(pinned)}"
        if len(names) < count and len(self._members) > len(names):
            held = set(names)
            if any(key not in held and evictable(key) for key in self._members):
                return f"victims({count}) named {len(names)} and withheld others"
        if len(self._active) != len(self._members):
            return f"policy has {len(self._active)} keys, the tier {len(self._members)}"
        return ""

    def _charge(self, call: str, start: float, keys: int) -> None:
        self._book(call, self._clock() - start, keys)

    def _book(self, call: str, spent_s: float, keys: int) -> None:
        """Book a call's time."""
        self._keys += max(1, keys)
        if spent_s > self._call_budget_s + keys * self._key_budget_s:
            self._note_slow(f"{call} of {keys} keys took {spent_s:.3f} s")
        else:
            self._spent_s += spent_s
        if self._keys >= _WINDOW_KEYS:
            mean_s = self._spent_s / self._keys
            self._passed += self._keys
            self._spent_s, self._keys = 0.0, 0
            if mean_s > self._key_budget_s:
                self._note_slow(f"took {mean_s * 1e6:.0f} us per key on average")

    def _note_slow(self, what: str) -> None:
        """A fault if it happened often lately."""
        now = self._passed + self._keys
        self._slow_at.append(now)
        often = len(self._slow_at) == self._patience
        if often and now - self._slow_at[0] <= _MEMORY_KEYS and not self.faults:
            self._fall_back(what)

    def _fall_back(self, reason: str) -> None:
        """LRU over the same members takes over. Their first order is that of insertion."""
        fallback = LruPolicy()
        fallback.insert_all(list(self._members), ())
        self._active = fallback
        self.faults.append(reason)
        logger.error("policy %s is replaced by LRU: %s", self._name, reason)
        if self._on_fault is not None:
            self._on_fault(reason)


def contained(
    policy: EvictionPolicy, tier: str, members: Collection[Key] | None = None
) -> EvictionPolicy:
    """The policy in a cage that logs for this tier. Our plain LRU needs none."""
    if type(policy) is LruPolicy:
        return policy
    return GuardedPolicy(policy, members=members, tier=tier)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

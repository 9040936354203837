"""Contains a faulty policy, so that it can cost hits but never affects an answer.

The guard watches every call. It replaces a policy permanently by LRU over the same members if the
policy raises (or calls ``sys.exit``), is slow, names keys that it must not name, or withholds
victims. The guard logs this once, counts it, and reports it to ``on_fault``. The guard never raises
because of the policy. A smaller guard does the same for admission policies.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import filterfalse, repeat
from typing import Any

from policies.base import (
    AdmissionPolicy,
    EntryInfo,
    EvictionPolicy,
    Key,
    RemoveCause,
    free_among,
    free_in,
)
from policies.eviction.lru import LruPolicy
from policies.safe_text import safe_repr

logger = logging.getLogger(__name__)

_WINDOW_KEYS = 4096
"""The guard checks the mean time per key after this number of keys."""
_MEMORY_KEYS = 1 << 17
"""The guard forgets a slow call after this many further keys."""
_WAIT_S = 0.005
"""A call counts as waiting if it waits longer than this plus the budget of its keys."""
_WAITS_MAX = 16
"""This number of consecutive waiting calls of one kind is a fault."""


class GuardedPolicy(EvictionPolicy):
    """Passes calls on to a policy, or to LRU after the policy's first fault.

    ``members`` is a live view of the tier's resident keys. The tier removes a key from it before it
    calls ``remove`` or ``clear``, and adds a key before it calls ``insert``. Without ``members``
    the guard keeps its own set.

    One call may take ``call_budget_s`` of the thread's processor time, plus ``key_budget_s`` per
    key; the mean per key must not exceed ``key_budget_s``. Keys that a policy had to pass while it
    chose victims count as well, if the test for them counts them (``passed``). A garbage collection
    during a call looks like work of the policy, so slowness is a fault only if it occurs
    ``patience`` times within a limited number of keys.

    Wall time alone says nothing about a policy, because a thread may be paused at any time: other
    processes get the processor, a quota is used up, a virtual machine is suspended. But such pauses
    affect single calls. A policy that sleeps or waits for a disk does so in call after call, which
    is a fault.
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
        cpu_clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.perf_counter,
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
        self._cpu_clock = cpu_clock
        self._wall_clock = wall_clock
        self._waits: dict[str, int] = {}  # the latest calls that waited, by kind
        self._spent_s = 0.0
        self._keys = 0
        self._passed = 0  # number of keys before the current window
        self._slow_at: deque[int] = deque(maxlen=patience)
        self._closes_prefixes = self._declares("keeps_prefixes_closed")
        self._takes_parts = self._declares("takes_parts")

    @property
    def active(self) -> EvictionPolicy:
        """The active policy: the guarded one, or LRU after a fault."""
        return self._active

    @property
    def keeps_prefixes_closed(self) -> bool:  # type: ignore[override]  # changes with a fault
        """The policy's guarantee. False after a fault, because LRU then starts from an arbitrary
        order."""
        return not self.faults and self._closes_prefixes

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]  # changes with a fault
        """True if the active policy accepts a request's touches in parts."""
        return LruPolicy.takes_parts if self.faults else self._takes_parts

    def insert(self, key: Key, info: EntryInfo) -> None:
        if self._own is not None:
            self._own[key] = None
        self._call("insert", 1, key, info)

    def insert_all(self, keys: Collection[Key], infos: Sequence[EntryInfo]) -> None:
        if self._own is not None:
            self._own.update(dict.fromkeys(keys))
        self._call("insert_all", len(keys), keys, infos)

    def touch(self, keys: Sequence[Key]) -> None:
        self._call("touch", len(keys), keys)

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        self._call("advise", len(keys), keys, hints)

    def victims(self, count: int, evictable: Callable[[Key], bool]) -> list[Key]:
        if self.faults:
            return self._active.victims(count, evictable)
        passed = getattr(evictable, "passed", 0)
        wall_s, cpu_s = self._wall_clock(), self._cpu_clock()
        try:
            names = self._active.victims(count, evictable)
            # keys that must stay are not the policy's fault, so they get time, too
            passed = getattr(evictable, "passed", 0) - passed
            cpu_s = self._cpu_clock() - cpu_s  # without the guard's own check of the names
            wall_s = self._wall_clock() - wall_s
            fault = self._wrong(names, count, evictable)
        except (Exception, SystemExit) as error:  # containing any exception is this class's purpose
            fault = f"victims raised {safe_repr(error)}"
        if fault:
            self._fall_back(fault)
            return self._active.victims(count, evictable)
        self._charge("victims", count + passed, cpu_s, wall_s)
        return names

    def remove(self, key: Key, cause: RemoveCause) -> None:
        if self._own is not None:
            self._own.pop(key, None)
        self._call("remove", 1, key, cause)

    def remove_all(self, keys: Sequence[Key], cause: RemoveCause) -> None:
        if self._own is not None:
            deque(map(self._own.pop, keys, repeat(None)), maxlen=0)
        self._call("remove_all", len(keys), keys, cause)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._call("use_clock", None, clock)

    def clear(self) -> None:
        if self._own is not None:
            self._own.clear()
        self._call("clear", None)

    def __len__(self) -> int:
        if self._own is not None:
            return len(self._own)
        if not self.faults:
            try:
                return len(self._active)
            except (Exception, SystemExit) as error:  # as in ``_call``
                self._fall_back(f"__len__ raised {safe_repr(error)}")
        return len(self._active)

    def _declares(self, name: str) -> bool:
        """Read an attribute of the policy. It is read only once, because it may be a property. A
        fault counts as False."""
        fault = ""
        try:
            value = getattr(self._active, name)
            if not isinstance(value, bool):
                fault = f"{name} is {_brief(value)}, not True or False"
        except (Exception, SystemExit) as error:  # as in ``_call``
            fault = f"{name} raised {safe_repr(error)}"
        if fault and not self.faults:
            self._fall_back(fault)
        return value if not fault else False

    def _call(self, name: str, keys: int | None, *arguments: Any) -> Any:
        """Pass a call on to the active policy. It gets the budget of ``keys`` keys; ``None`` means
        that the call's time does not count. If the policy raises, LRU takes over and gets the call
        as well. This is harmless: LRU starts from ``members``, which already contains inserted keys
        and no longer contains removed ones."""
        if not self.faults:
            wall_s, cpu_s = self._wall_clock(), self._cpu_clock()
            try:
                result = getattr(self._active, name)(*arguments)
            except (Exception, SystemExit) as error:
                # containing any exception is this class's purpose
                self._fall_back(f"{name} raised {safe_repr(error)}")
            else:
                if keys is not None:
                    cpu_s = self._cpu_clock() - cpu_s
                    self._charge(name, keys, cpu_s, self._wall_clock() - wall_s)
                return result
        return getattr(self._active, name)(*arguments)

    def _wrong(self, names: object, count: int, evictable: Callable[[Key], bool]) -> str:
        """Describe what is wrong with these victims, or return an empty text."""
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
            if any(key not in held for key in free_in(self._members, evictable)):
                return f"victims({count}) named {len(names)} and withheld others"
        if len(self._active) != len(self._members):
            return f"policy has {len(self._active)} keys, the tier {len(self._members)}"
        return ""

    def _charge(self, call: str, keys: int, cpu_s: float, wall_s: float) -> None:
        """Count the time of a call against the policy's budgets."""
        self._keys += max(1, keys)
        allowed_s = keys * self._key_budget_s
        if cpu_s > self._call_budget_s + allowed_s:
            self._note_slow(f"{call} of {keys} keys took {cpu_s:.3f} s of processor time")
        else:
            self._spent_s += cpu_s
        if wall_s - cpu_s > _WAIT_S + allowed_s:
            self._note_wait(call, wall_s - cpu_s)
        elif self._waits:
            self._waits.pop(call, None)
        if self._keys >= _WINDOW_KEYS:
            mean_s = self._spent_s / self._keys
            self._passed += self._keys
            self._spent_s, self._keys = 0.0, 0
            if mean_s > self._key_budget_s:
                self._note_slow(f"took {mean_s * 1e6:.0f} us of processor time per key on average")

    def _note_slow(self, what: str) -> None:
        """Replace the policy if it was slow ``patience`` times recently."""
        now = self._passed + self._keys
        self._slow_at.append(now)
        often = len(self._slow_at) == self._patience
        if often and now - self._slow_at[0] <= _MEMORY_KEYS and not self.faults:
            self._fall_back(what)

    def _note_wait(self, call: str, waited_s: float) -> None:
        """Replace the policy if the last ``_WAITS_MAX`` calls of this kind have waited."""
        waits = self._waits[call] = self._waits.get(call, 0) + 1
        if waits == _WAITS_MAX and not self.faults:
            last = f"the last for {waited_s:.3f} s"
            self._fall_back(f"{waits} consecutive calls of {call} waited, {last}")

    def _fall_back(self, reason: str) -> None:
        """Replace the policy by LRU over ``members``, in their order."""
        fallback = LruPolicy()
        fallback.insert_all(list(self._members), ())
        self._active = fallback
        self.faults.append(reason)
        logger.error("kvtiers: policy %s is replaced by LRU: %s", self._name, reason)
        if self._on_fault is not None:
            self._on_fault(reason)


class GuardedAdmission(AdmissionPolicy):
    """Passes calls on to an admission policy. After the policy's first fault it admits every
    chunk.

    A fault is any exception, also that of ``sys.exit``. It is logged once. Time is not limited.
    """

    def __init__(self, policy: AdmissionPolicy, tier: str) -> None:
        self._policy: AdmissionPolicy | None = policy
        self._name = f"{type(policy).__name__} of tier {tier}"

    def admit(self, key: Key, info: EntryInfo) -> bool:
        if self._policy is None:
            return True
        try:
            return bool(self._policy.admit(key, info))
        except (Exception, SystemExit) as error:  # the policy may be third-party code
            self._policy = None
            logger.error(
                "kvtiers: admission policy %s is replaced by one that admits every chunk: admit "
                "raised %s",
                self._name,
                safe_repr(error),
            )
            return True

    def use_clock(self, clock: Callable[[], float]) -> None:
        if self._policy is not None:
            self._policy.use_clock(clock)


def contained(
    policy: EvictionPolicy, tier: str, members: Collection[Key] | None = None
) -> EvictionPolicy:
    """Wrap a policy in a guard that names this tier in the log. Plain LRU from this package needs
    no guard."""
    if type(policy) is LruPolicy:
        return policy
    return GuardedPolicy(policy, members=members, tier=tier)


def _brief(value: object) -> str:
    text = safe_repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

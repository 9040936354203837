"""Whatever a policy does wrong, LRU takes over with the same members."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from policies.base import EntryInfo, RemoveCause
from policies.eviction.fifo import FifoPolicy
from policies.eviction.lru import LruPolicy
from policies.guarded import GuardedPolicy
from policies.testing import PolicyContract
from tests.patience import PATIENCE_S
from tests.unprintable import Unprintable

INFO = EntryInfo()


class TestGuardedContract(PolicyContract):
    """The guard itself fulfils the interface of a policy."""

    examples = 15

    def make_policy(self) -> GuardedPolicy:
        return GuardedPolicy(FifoPolicy())


class Clock:
    """Time that passes only on command."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Evil(LruPolicy):
    """Does one wrong thing on command."""

    wrong = ""
    clock = Clock()

    def _maybe(self, call):
        if self.wrong == f"raise in {call}":
            raise RuntimeError("on purpose")
        if self.wrong == f"exit in {call}":
            sys.exit(3)
        if self.wrong == f"toil in {call}":
            self.clock.now += 1.0

    def insert(self, key, info):
        self._maybe("insert")
        super().insert(key, info)

    def touch(self, keys):
        self._maybe("touch")
        super().touch(keys)

    def victims(self, count, evictable):
        self._maybe("victims")
        if self.wrong == "pinned":
            return super().victims(count, lambda key: not evictable(key))
        if self.wrong == "unknown":
            return ["nobody"]
        if self.wrong == "twice":
            return super().victims(1, evictable) * 2
        if self.wrong == "too many":
            return super().victims(count + 1, evictable)
        if self.wrong == "none":
            return []
        if self.wrong == "no list":
            return None
        if self.wrong == "forgets":
            self._part_of.popitem()
        return super().victims(count, evictable)

    def remove(self, key, cause):
        self._maybe("remove")
        super().remove(key, cause)

    def clear(self):
        self._maybe("clear")
        super().clear()


WRONGS = {
    "raise in insert": "insert raised RuntimeError('on purpose')",
    "raise in touch": "touch raised RuntimeError('on purpose')",
    "raise in victims": "victims raised RuntimeError('on purpose')",
    "raise in remove": "remove raised RuntimeError('on purpose')",
    "raise in clear": "clear raised RuntimeError('on purpose')",
    **{f"exit in {c}": f"{c} raised SystemExit(3)" for c in ("insert", "touch", "victims")},
    "toil in insert": "insert of 1 keys took 1.000 s of processor time",
    "toil in touch": "touch of 2 keys took 1.000 s of processor time",
    "toil in victims": "victims of 2 keys took 1.000 s of processor time",
    "toil in remove": "remove of 1 keys took 1.000 s of processor time",
    "pinned": "victims named a pinned key 1",
    "unknown": "victims named an unknown key 'nobody'",
    "twice": "victims named a key twice",
    "too many": "victims(2) returned [0, 2, 3]",
    "none": "victims(2) named 0 and withheld others",
    "no list": "victims(2) returned None",
    "forgets": "policy has 4 keys, the tier 5",
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("wrong", WRONGS)
def test_a_fault_ends_in_lru_over_the_same_members(wrong, shared, caplog) -> None:
    faults: list[str] = []
    evil = Evil()
    resident: dict[int, None] = {}
    members = resident if shared else None
    policy = GuardedPolicy(evil, faults.append, members=members, patience=1, cpu_clock=Evil.clock)
    for key in range(5):
        resident[key] = None
        policy.insert(key, INFO)
    pinned = {1}
    evil.wrong = wrong
    with caplog.at_level(logging.ERROR):
        policy.touch([0, 1] if "touch" in wrong else [])
        named = policy.victims(2, lambda key: key not in pinned)
        for key in named[:1]:
            del resident[key]
            policy.remove(key, RemoveCause.EVICTED)
        resident[9] = None
        policy.insert(9, INFO)
        if "clear" in wrong:
            resident.clear()
            policy.clear()
            resident[3] = None
            policy.insert(3, INFO)
    assert policy.faults == faults == [WRONGS[wrong]]
    assert len(caplog.records) == 1
    assert "Evil is replaced by LRU" in caplog.text
    assert isinstance(policy.active, LruPolicy)
    assert not isinstance(policy.active, Evil)
    assert not policy.keeps_prefixes_closed
    assert len(named) == 2
    assert 1 not in named
    assert set(policy.victims(99, lambda key: True)) == set(resident)
    assert len(policy) == len(resident)
    policy.touch([3])
    policy.advise([3], {"session_end": True})
    assert policy.victims(99, lambda key: True)[-1] == 3


class Slow(LruPolicy):
    """Makes its next insertion take this many seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.seconds = 0.0

    def insert(self, key, info):
        self.clock.now += self.seconds
        super().insert(key, info)


def test_slow_on_average_is_a_fault_too() -> None:
    slow = Slow()
    slow.seconds = 0.001
    policy = GuardedPolicy(slow, cpu_clock=slow.clock)
    for key in range(3 * 4096):
        assert not policy.faults
        policy.insert(key, INFO)
    assert policy.faults == ["took 1000 us of processor time per key on average"]
    assert len(policy) == 3 * 4096


@pytest.mark.parametrize(("pause_keys", "kept"), [(1_000, False), (70_000, True)])
def test_calls_that_are_occasionally_slow_are_not_a_fault(pause_keys: int, kept: bool) -> None:
    """A garbage collection looks like work of the policy."""
    slow = Slow()
    policy = GuardedPolicy(slow, cpu_clock=slow.clock)
    for number in range(3):
        slow.seconds = 30.0
        policy.insert(number, INFO)
        slow.seconds = 0.0
        for _ in range(pause_keys // 100):
            policy.touch(range(100))
    assert (policy.active is slow) == kept
    slowness = "insert of 1 keys took 30.000 s of processor time"
    assert policy.faults == ([] if kept else [slowness])


STOPPED = """
import os, signal
from policies.base import EntryInfo
from policies.eviction.fifo import FifoPolicy
from policies.guarded import GuardedPolicy

class Stopped(FifoPolicy):
    def insert(self, key, info):
        os.kill(os.getpid(), signal.SIGSTOP)
        super().insert(key, info)

policy = GuardedPolicy(Stopped(), call_budget_s=0.01)
for key in range(5):
    policy.insert(key, EntryInfo())
print(policy.faults)
"""


def test_a_machine_that_stands_still_is_not_the_policys_fault() -> None:
    """The process is stopped in the middle of five calls, for longer than a call may take."""
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(5):
                stopped = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                assert stopped is not None
                assert stopped.si_code == os.CLD_STOPPED, "it ended before it was stopped"
                os.waitid(os.P_PID, child.pid, os.WSTOPPED)
                time.sleep(0.03)  # the time for which the machine stands still
                child.send_signal(signal.SIGCONT)
            output, _ = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()  # even if it is stopped
    assert (child.returncode, output) == (0, "[]\n")


def test_work_counts_by_the_clock_of_a_real_thread() -> None:
    class Toiling(FifoPolicy):
        def insert(self, key, info):
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
            super().insert(key, info)

    policy = GuardedPolicy(Toiling(), call_budget_s=0.005)
    for key in range(3):
        assert not policy.faults
        policy.insert(key, INFO)
    [fault] = policy.faults
    assert "processor time" in fault


def test_a_policy_that_waits_again_and_again_is_replaced() -> None:
    class Sleeping(FifoPolicy):
        def touch(self, keys):
            time.sleep(0.006)

    policy = GuardedPolicy(Sleeping())
    for key in range(16):
        assert not policy.faults
        policy.insert(key, INFO)  # does not wait, and says nothing about other calls
        policy.touch([key])
    [fault] = policy.faults
    assert fault.startswith("16 consecutive calls of touch waited, the last for ")
    assert len(policy) == 16


def test_waits_between_calls_that_do_not_wait_are_not_a_fault() -> None:
    class Sometimes(FifoPolicy):
        seconds = 0.0

        def touch(self, keys):
            clock.now += self.seconds

    inner, clock = Sometimes(), Clock()
    policy = GuardedPolicy(inner, pytest.fail, wall_clock=clock, cpu_clock=lambda: 0.0)
    for _ in range(10):
        inner.seconds = 1.0
        for _ in range(15):
            policy.touch([1])
        inner.seconds = 0.0
        policy.touch([1])
    assert policy.active is inner


def test_checking_all_members_counts_as_the_guards_time() -> None:
    inner = LruPolicy()
    clock = Clock()
    policy = GuardedPolicy(inner, cpu_clock=clock, patience=1)
    for key in range(5):
        policy.insert(key, INFO)
    asked: list[int] = []

    def pinned(key: int) -> bool:
        asked.append(key)
        clock.now += 1.0 if len(asked) > 5 else 0.0  # the policy has tested all of them once
        return False

    assert policy.victims(1, pinned) == []
    assert len(asked) == 10
    assert policy.active is inner


def test_keys_that_must_stay_are_not_the_policys_fault() -> None:
    """The policy takes 50 us per key and passes 20 protected keys per victim."""

    class Test:
        passed = 0

        def __call__(self, key: object) -> bool:
            self.passed += key % 21 != 0
            return key % 21 == 0

    class PerTest(LruPolicy):
        def victims(self, count, evictable):
            return super().victims(count, lambda key: clock.advance() and evictable(key))

    clock = Clock()
    clock.advance = lambda: setattr(clock, "now", clock.now + 50e-6) is None
    policy = GuardedPolicy(PerTest(), pytest.fail, cpu_clock=clock, wall_clock=lambda: 0.0)
    policy.insert_all(range(21_000), [INFO] * 21_000)
    for _ in range(20):
        test = Test()
        assert len(policy.victims(1000, test)) == 1000
        assert test.passed == 20_000
    assert policy.faults == []


def test_a_good_policy_is_left_alone() -> None:
    inner = LruPolicy()
    policy = GuardedPolicy(inner, pytest.fail)
    for key in range(10_000):
        policy.insert(key, INFO)
        policy.touch([key])
    assert policy.victims(3, lambda key: True) == [0, 1, 2]
    assert policy.active is inner
    assert policy.keeps_prefixes_closed


@pytest.mark.parametrize("call", ["insert", "victims", "returns"])
def test_an_error_whose_text_cannot_be_made_is_contained(call: str) -> None:
    class Faulty(LruPolicy):
        def insert(self, key, info):
            if call == "insert":
                raise Unprintable
            super().insert(key, info)

        def victims(self, count, evictable):
            if call == "victims":
                raise Unprintable
            return Unprintable()

    policy = GuardedPolicy(Faulty())
    for key in range(2):
        policy.insert(key, INFO)
    assert policy.victims(1, lambda key: True) == [0]
    doing = "victims(1) returned" if call == "returns" else f"{call} raised"
    assert policy.faults == [f"{doing} Unprintable (its __repr__ raises)"]


def test_hints_that_raise_are_contained() -> None:
    class Deaf(LruPolicy):
        def advise(self, keys, hints):
            raise KeyError("session")

    policy = GuardedPolicy(Deaf())
    policy.insert(1, INFO)
    policy.advise([1], {"session_end": True})
    assert policy.faults == ["advise raised KeyError('session')"]


@pytest.mark.parametrize("one", ["insert", "remove"])
def test_a_policy_that_overrides_single_keys_gets_each_of_many(one: str) -> None:
    """The override is called even if the inherited policy is faster with many keys at once."""
    calls: list[object] = []

    def override(self: LruPolicy, key: int, what: object) -> None:
        calls.append(key)
        getattr(LruPolicy, one)(self, key, what)

    policy = type("Own", (LruPolicy,), {one: override})()
    keys = list(range(8))
    policy.insert_all(keys, [INFO] * len(keys))
    policy.remove_all(keys[:2], RemoveCause.EVICTED)
    assert calls == (keys if one == "insert" else keys[:2])
    assert len(policy) == len(keys) - 2
    calls.clear()
    mixed = type("Mixed", (type("Mixin", (), {one: override}), LruPolicy), {})()
    mixed.insert_all(keys, [INFO] * len(keys))
    mixed.remove_all(keys, RemoveCause.EVICTED)
    assert calls == keys
    both = type("Both", (LruPolicy,), {one: override, f"{one}_all": lambda *_: calls.clear()})()
    getattr(both, f"{one}_all")(keys, [])
    assert calls == []


def test_parts_are_accepted_if_the_policy_in_use_accepts_them() -> None:
    whole = type("Whole", (LruPolicy,), {"takes_parts": False})()
    policy = GuardedPolicy(whole)
    assert not policy.takes_parts
    assert GuardedPolicy(LruPolicy()).takes_parts
    whole.touch = None
    policy.touch([1])
    assert policy.faults
    assert policy.takes_parts


@pytest.mark.parametrize("name", ["keeps_prefixes_closed", "takes_parts"])
@pytest.mark.parametrize("wrong", ["raises", "exits", "has no text", "is no bool"])
def test_an_attribute_that_cannot_be_read_is_contained(name: str, wrong: str) -> None:
    """The policy is replaced at the start, before its first call."""

    def read(_: object) -> object:
        if wrong == "raises":
            raise RuntimeError("on purpose")
        if wrong == "exits":
            sys.exit(3)
        return Unprintable() if wrong == "has no text" else 1

    policy_class = type("Faulty", (FifoPolicy,), {name: property(read)})
    told: list[str] = []
    members = dict.fromkeys(range(3))
    policy = GuardedPolicy(policy_class(), told.append, members=members)
    what = {
        "raises": "raised RuntimeError('on purpose')",
        "exits": "raised SystemExit(3)",
        "has no text": "is Unprintable (its __repr__ raises), not True or False",
        "is no bool": "is 1, not True or False",
    }[wrong]
    assert policy.faults == told == [f"{name} {what}"]
    assert type(policy.active) is LruPolicy
    assert not policy.keeps_prefixes_closed
    assert policy.takes_parts, "those of LRU"
    assert policy.victims(2, lambda key: True) == [0, 1]


@pytest.mark.parametrize("name", ["keeps_prefixes_closed", "takes_parts"])
def test_an_attribute_that_fails_later_is_contained(name: str) -> None:
    """It is a promise, which must not change, so it is read once."""
    values = [True]
    policy = GuardedPolicy(type("Once", (FifoPolicy,), {name: property(lambda _: values.pop())})())
    assert getattr(policy, name)
    assert getattr(policy, name)
    assert policy.faults == []


@pytest.mark.parametrize("size", ["three", -1, None])
def test_a_size_that_is_no_number_is_contained(size: object) -> None:
    wrong = type("Sizeless", (FifoPolicy,), {"__len__": lambda _: size})
    policy = GuardedPolicy(wrong(), members=dict.fromkeys(range(3)))
    assert len(policy) == 3
    assert len(policy) == 3
    assert len(policy.faults) == 1
    assert policy.faults[0].startswith("__len__ raised ")

"""The conformance kit: tests that an eviction policy fulfils the interface. Use it for your own
policies.

    from policies.testing import PolicyContract

    class TestMyPolicy(PolicyContract):
        def make_policy(self) -> MyPolicy:
            return MyPolicy()

Needs pytest and hypothesis. The kit checks membership against a naive model under random
operations, adversarial patterns, bounded memory, repeatability, closed prefixes if the policy
promises them, and an almost constant cost per operation as the number of keys grows.

Owns the conformance kit for eviction policies.

Must not know the policies that it tests.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from policies.base import EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.simulation.simulator import SimTier, simulate
from policies.simulation.trace import Request, Trace, to_runs
from policies.testing.model import PolicyMachine

INFO = EntryInfo()
BIG = bool(os.environ.get("KVTIERS_BIG_TESTS"))


def find_hole(keys: Sequence[Key], present: Callable[[Key], bool]) -> tuple[int, int] | None:
    """The first hole in a prefix: the position of the first absent key, and that of the first
    present key after it. ``None`` if there is no hole."""
    absent = -1
    for position, key in enumerate(keys):
        if present(key):
            if absent >= 0:
                return absent, position
        elif absent < 0:
            absent = position
    return None


def _anything(key: Key) -> bool:
    return True


def synthetic_trace(
    seed: int, requests: int = 400, sessions: int = 40, systems: int = 3, block_tokens: int = 16
) -> Trace:
    """Conversations that share system prompts, grow, pause, sometimes branch back, and end."""
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    heads = [[next(fresh) for _ in range(rng.randint(2, 12))] for _ in range(systems)]
    live: dict[int, list[int]] = {}
    found: list[Request] = []
    for number in range(requests):
        session = rng.randrange(sessions)
        blocks = live.get(session) or list(rng.choice(heads))
        if rng.random() < 0.1:
            blocks = blocks[: max(1, rng.randrange(len(blocks)))]
        blocks = [*blocks, *(next(fresh) for _ in range(rng.randint(1, 9)))]
        ends = rng.random() < 0.15 or len(blocks) > 80
        live[session] = [] if ends else blocks
        tokens = len(blocks) * block_tokens + rng.randrange(block_tokens)
        stop = "tool_use" if rng.random() < 0.5 else "end_turn"
        found.append(Request(float(number), tokens, to_runs(blocks), 10, session, stop, ends))
    return Trace(f"synthetic-{seed}", block_tokens, found)


def play(policy: EvictionPolicy, script: str) -> str:
    """Run a script, for tests of expected sequences. Its keys are words.

    ``"+a +b a,b !1"`` inserts a, then b (each followed by its request's touch), touches both in one
    request, then evicts one. ``"-a"`` drops a key. Returns the evicted keys, in order.
    """
    evicted: list[str] = []
    for word in script.split():
        if word[0] == "+":
            keys = word[1:].split(",")
            for key in reversed(keys):
                policy.insert(key, INFO)
            policy.touch(keys)
        elif word[0] == "-":
            policy.remove(word[1:], RemoveCause.DROPPED)
        elif word[0] == "!":
            for victim in policy.victims(int(word[1:]), _anything):
                policy.remove(victim, RemoveCause.EVICTED)
                evicted.append(str(victim))
        else:
            policy.touch(word.split(","))
    return " ".join(evicted)


class PolicyContract:
    """The contract of every policy. Inherit from this class, define ``make_policy``, and let pytest
    collect your class.

    The model test makes ``examples`` random runs. With ``shrink``, it searches for the smallest
    failing run.
    """

    examples = 40
    shrink = True

    def make_policy(self) -> EvictionPolicy:
        """Create the policy to test."""
        raise NotImplementedError

    def test_membership_follows_a_naive_model(self) -> None:
        machine = type("Machine", (PolicyMachine,), {"make": staticmethod(self.make_policy)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[phase for phase in Phase if self.shrink or phase is not Phase.shrink],
            ),
        )

    def test_few_keys_are_named_exactly(self) -> None:
        """Two requests store three keys, and two others touch them in every order, including
        repeated keys."""
        touches = product(range(3), repeat=4)
        for touch, pinned, count in product(touches, (None, 0, 1, 2), (1, 2, 3)):
            policy = self.make_policy()
            for keys in ((0,), (1, 2)):
                for key in reversed(keys):
                    policy.insert(key, INFO)
                policy.touch(keys)
            policy.touch(touch)
            policy.touch(touch[:2])
            named = policy.victims(count, lambda key, pinned=pinned: key != pinned)  # type: ignore[misc]  # the default binds now
            asked = f"{count} after {touch}, {pinned} pinned: {named}"
            free = {0, 1, 2} - {pinned}
            assert set(named) <= free, asked
            assert len(named) == len(set(named)) == min(count, len(free)), asked
            for key in (0, 1, 2):
                policy.remove(key, RemoveCause.EVICTED)
            assert len(policy) == 0

    @pytest.mark.parametrize("seed", [8, 9])
    def test_many_at_once_are_as_one_by_one(self, seed: int) -> None:
        draw = random.Random(seed)
        keys = list(range(60))
        at_once, one_by_one = self.make_policy(), self.make_policy()
        at_once.insert_all(keys, [INFO] * len(keys))
        for key in keys:
            one_by_one.insert(key, INFO)
        for step in range(60, 160):
            used = draw.sample(range(step), 5)
            count, pinned = draw.randrange(4), set(draw.sample(range(step), 8))
            named = []
            for policy in (at_once, one_by_one):
                policy.insert(step, INFO)
                policy.touch(used)
                named.append(policy.victims(count, lambda key: key not in pinned))  # noqa: B023  # called at once
                for victim in named[-1]:
                    policy.remove(victim, RemoveCause.EVICTED)
            assert named[0] == named[1], f"seed {seed}, step {step}"
            assert len(at_once) == len(one_by_one)

    @pytest.mark.parametrize("seed", [1, 2])
    def test_same_requests_same_decisions(self, seed: int) -> None:
        logs: list[list[int]] = [[], []]
        for log in logs:
            simulate(synthetic_trace(seed), self.make_policy(), 90, hit_log=log)
        assert logs[0] == logs[1], f"seed {seed}"

    def test_clear_forgets_history(self) -> None:
        used, new = self.make_policy(), self.make_policy()
        simulate(synthetic_trace(3), used, 60)
        used.clear()
        logs: list[list[int]] = [[], []]
        for policy, log in zip((used, new), logs, strict=True):
            simulate(synthetic_trace(4), policy, 60, hit_log=log)
        assert logs[0] == logs[1]

    @pytest.mark.parametrize("pattern", ["scan", "loop", "hammer", "stairs", "alternate"])
    def test_adversarial_patterns(self, pattern: str) -> None:
        policy = self.make_policy()
        tier = SimTier(policy, 50)
        for keys in _adversary(pattern):
            fresh = [key for key in keys if key not in tier.resident]
            tier.store(fresh, [INFO] * len(fresh), keys)
            tier.touch(keys)
            assert len(tier.resident) <= 50
            assert len(policy) == len(tier.resident)

    def test_nothing_is_named_when_all_is_pinned(self) -> None:
        policy = self.make_policy()
        for key in range(20):
            policy.insert(key, INFO)
        policy.touch(range(20))
        assert policy.victims(5, lambda key: False) == []
        assert policy.victims(99, lambda key: key == 7) == [7]
        assert len(policy) == 20

    def test_keys_that_must_stay_are_tested_a_few_times(self) -> None:
        """If half of the keys must stay, a search tests each key a few times at most. Later
        searches find the right victims as well."""
        policy = self.make_policy()
        _fill(policy, 2_000)
        for first in range(2_000, 2_640, 64):
            tested = 0

            def evictable(key: Key) -> bool:
                nonlocal tested
                tested += 1
                return not isinstance(key, int) or key >= 1_000

            named = policy.victims(64, evictable)
            assert len(set(named)) == 64
            assert not set(named) & set(range(1_000))
            assert tested <= 10 * len(policy), f"{tested} tests of {len(policy)} keys"
            for key in named:
                policy.remove(key, RemoveCause.EVICTED)
            for key in reversed(range(first, first + 64)):
                policy.insert(key, INFO)
            policy.touch(range(first, first + 64))
        assert set(policy.victims(2_000, _anything)) >= set(range(1_000))

    def test_memory_is_bounded_by_members(self) -> None:
        policy = self.make_policy()
        tier = SimTier(policy, 200)
        sizes = []
        for round_ in range(60):
            for first in range(round_ * 500, round_ * 500 + 500, 10):
                tier.store(range(first, first + 10), [INFO] * 10, ())
                tier.touch(range(first, first + 10))
            sizes.append(_reachable(policy))
        assert max(sizes[-5:]) <= 1.3 * max(sizes[20:30]) + 2_000, f"objects held: {sizes}"

    @pytest.mark.parametrize("seed", [5, 6, 7])
    def test_prefixes_stay_closed_if_promised(self, seed: int) -> None:
        policy = self.make_policy()
        if not policy.keeps_prefixes_closed:
            pytest.skip("the policy does not promise it")
        trace = synthetic_trace(seed, requests=600)
        tier = SimTier(policy, 150)
        chains: list[list[int]] = []
        for request in trace.requests:
            blocks = request.blocks()
            chains.append(blocks)
            fresh = [block for block in blocks if block not in tier.resident]
            tier.store(fresh, [INFO] * len(fresh), blocks)
            tier.touch(blocks)
            if request.last:
                policy.advise(blocks, {"session_end": True})
            for chain in chains[-60:]:
                hole = find_hole(chain, tier.resident.__contains__)
                assert hole is None, f"seed {seed}: hole {hole} in {chain}"

    def test_steps_hardly_grow(self) -> None:
        """The number of Python lines that operations execute must not depend on the number of
        keys."""
        few, many = (steps(self.make_policy(), keys) for keys in (1_000, 16_000))
        assert many <= 3 * few, f"{few} lines at 1,000 keys, {many} at 16,000"

    @pytest.mark.skipif(not BIG, reason="timed: set KVTIERS_BIG_TESTS=1 on a quiet machine")
    def test_speed_hardly_falls(self) -> None:
        """From 10^4 to 10^6 keys, cache misses and log n may slow operations down, but by less than
        a factor of 30.

        Detects costs that do not show in the number of executed Python lines, such as sorting, or
        walking over holes in a dict.
        """
        speeds = [operations_per_second(self.make_policy(), keys) for keys in (10_000, 1_000_000)]
        assert speeds[0] <= 30 * speeds[1], f"operations per second: {speeds}"


def steps(policy: EvictionPolicy, keys: int) -> int:
    """Count the lines of Python that a fixed set of operations executes with ``keys`` members."""
    _fill(policy, keys)
    for _ in _rounds(policy, keys, 40):
        pass  # lets the queues reach a steady state
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in _rounds(policy, 2 * keys, 40):
            pass
    finally:
        sys.settrace(before)
    return lines


def operations_per_second(policy: EvictionPolicy, keys: int, rounds: int = 400) -> float:
    """Keys stored, touched and evicted per second with ``keys`` members: the median over several
    rounds."""
    _fill(policy, keys)
    clock = time.perf_counter
    times = []
    start = clock()
    for operations in _rounds(policy, keys, rounds):
        times.append((clock() - start) / operations)
        start = clock()
    return 1 / statistics.median(times)


def _fill(policy: EvictionPolicy, keys: int) -> None:
    for first in range(0, keys, 100):
        for key in range(first + 99, first - 1, -1):
            policy.insert(key, INFO)
        policy.touch(range(first, first + 100))


def _rounds(policy: EvictionPolicy, keys: int, rounds: int) -> Iterator[int]:
    """Requests with a constant number of members: evict and insert 16 keys, touch them and 32 older
    ones."""
    rng = random.Random(rounds)
    for first in range(keys, keys + 16 * rounds, 16):
        for victim in policy.victims(16, _anything):
            policy.remove(victim, RemoveCause.EVICTED)
        for key in range(first + 15, first - 1, -1):
            policy.insert(key, INFO)
        policy.touch(range(first, first + 16))
        older = rng.randrange(keys // 2, keys - 32)
        policy.touch(range(older, older + 32))
        yield 80


def _adversary(pattern: str) -> Iterator[Sequence[int]]:
    """Request sequences, each of which is adversarial for some policy."""
    for turn in range(300):
        if pattern == "scan":
            yield range(turn * 20, turn * 20 + 20)
        elif pattern == "loop":
            yield range(turn % 6 * 10, turn % 6 * 10 + 10)
        elif pattern == "hammer":
            yield (1,)
            yield (1_000 + turn,)
        elif pattern == "stairs":
            yield range(turn % 70 + 1)
        else:
            base = 0 if turn // 50 % 2 else 10_000 + turn * 5
            yield range(base, base + 30)


def _reachable(root: object) -> int:
    """Count the objects that a policy keeps alive, without classes, modules and code."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, type(gc), type(play))):
            continue
        seen.add(id(thing))
        todo.extend(gc.get_referents(thing))
    return len(seen)

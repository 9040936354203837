"""Simulator results against implementations that share no code with what they check."""

from __future__ import annotations

import itertools

import pytest

from policies.eviction.arc import ArcPolicy
from policies.eviction.fifo import FifoPolicy
from policies.eviction.leaf_lru import LeafLruPolicy
from policies.eviction.lru import LruPolicy
from policies.simulation.belady import infinite_hits, optimum_hits
from policies.simulation.simulator import simulate
from policies.simulation.trace import Request, Trace, to_runs
from policies.testing import synthetic_trace


def _trace(prompts: list[list[int]]) -> Trace:
    requests = [
        Request(float(i), 16 * len(blocks), to_runs(blocks)) for i, blocks in enumerate(prompts)
    ]
    return Trace("hand", 16, requests)


def _tiny(seed: int) -> list[list[int]]:
    """Seven prompts over a tree of nine blocks (children of b are 2b and 2b + 1)."""
    import random

    rng = random.Random(seed)
    prompts = []
    for _ in range(7):
        block, blocks = 1, [1]
        while len(blocks) < rng.choice((1, 2, 3)):
            block = 2 * block + rng.randrange(2)
            blocks.append(block)
        prompts.append(blocks)
    return prompts


def _leading(blocks: list[int], held: object) -> int:
    return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))  # type: ignore[operator]  # any container


def _best_by_search(prompts: list[list[int]], capacity: int) -> int:
    """All choices of the blocks to keep after each request, exhaustively."""
    best = {frozenset[int](): 0}
    for blocks in prompts:
        following: dict[frozenset[int], int] = {}
        for held, score in best.items():
            score += _leading(blocks, held)
            pool = sorted(held | set(blocks))
            for size in range(min(capacity, len(pool)) + 1):
                for kept in itertools.combinations(pool, size):
                    key = frozenset(kept)
                    following[key] = max(following.get(key, 0), score)
        best = following
    return max(best.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_equals_an_exhaustive_search(seed: int, capacity: int) -> None:
    prompts = _tiny(seed)
    assert sum(optimum_hits(_trace(prompts), capacity)) == _best_by_search(prompts, capacity)


class _NaiveTier:
    """Lists and rescans: one request at a time, with separate code for every rule."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def run(self, prompts: list[list[int]]) -> list[int]:
        hits = []
        for blocks in prompts:
            hits.append(_leading(blocks, self.members()))
            fresh = [block for block in blocks if block not in self.members()]
            free = self.capacity - len(self.members())
            while free < len(fresh):
                gone = self.evict(set(blocks))
                if gone is None:
                    break
                free += 1
            for block in reversed(fresh[:free]):
                self.enter(block)
            for block in reversed(blocks):
                if block in self.members():
                    self.use(block, new=block in fresh)
        return hits


class _NaiveLru(_NaiveTier):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.last: dict[int, int] = {}
        self.now = 0

    def members(self):
        return self.last

    def evict(self, kept):
        free = [block for block in self.last if block not in kept]
        if not free:
            return None
        oldest = min(free, key=self.last.__getitem__)
        del self.last[oldest]
        return oldest

    def enter(self, block):
        self.now += 1
        self.last[block] = self.now

    def use(self, block, new):
        self.enter(block)


class _NaiveFifo(_NaiveLru):
    def use(self, block, new):
        pass


class _NaiveArc(_NaiveTier):
    """T1, T2, B1, B2 as lists, oldest first, as in the paper; adapted when a ghost returns."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def members(self):
        return [*self.t1, *self.t2]

    def evict(self, kept):
        if not hasattr(self, "full"):
            self.full = len(self.t1) + len(self.t2)
        self.full = max(self.full, len(self.t1) + len(self.t2))
        order = (self.t1, self.t2) if len(self.t1) > self.p else (self.t2, self.t1)
        for queue in order:
            for block in queue:
                if block not in kept:
                    queue.remove(block)
                    (self.b1 if queue is self.t1 else self.b2).append(block)
                    while len(self.b1) > max(0, self.full - len(self.t1)):
                        self.b1.pop(0)
                    held = len(self.t1) + len(self.t2) + len(self.b1)
                    while len(self.b2) > max(0, 2 * self.full - held):
                        self.b2.pop(0)
                    return block
        return None

    def enter(self, block):
        if block in self.b1:
            self.p = min(self.full, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(block)
            self.t2.append(block)
        elif block in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(block)
            self.t2.append(block)
        else:
            self.t1.append(block)

    def use(self, block, new):
        if block in self.t2:
            self.t2.remove(block)
            self.t2.append(block)
        else:
            self.t1.remove(block)
            (self.t1 if new else self.t2).append(block)


@pytest.mark.parametrize("capacity", [20, 75, 160])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("policy", "naive"),
    [
        (LruPolicy, _NaiveLru),
        (LeafLruPolicy, _NaiveLru),
        (FifoPolicy, _NaiveFifo),
        (ArcPolicy, _NaiveArc),
    ],
)
def test_hits_equal_those_of_a_naive_implementation(policy, naive, seed, capacity) -> None:
    trace = synthetic_trace(seed, requests=250)
    log: list[int] = []
    simulate(trace, policy(), capacity, hit_log=log)
    assert log == naive(capacity).run([request.blocks() for request in trace.requests])
    assert sum(log) > 0


def test_an_infinite_cache_equals_lru_with_space_for_all() -> None:
    trace = synthetic_trace(9)
    log: list[int] = []
    simulate(trace, LruPolicy(), trace.unique_blocks(), hit_log=log)
    assert log == list(infinite_hits(trace))
    assert sum(optimum_hits(trace, trace.unique_blocks())) == sum(log)


@pytest.mark.parametrize("capacity", [10, 40, 120])
def test_no_policy_beats_the_optimum(capacity: int) -> None:
    from policies.registry import make_policy, policy_names

    trace = synthetic_trace(11)
    best = sum(optimum_hits(trace, capacity))
    for name in policy_names():
        log: list[int] = []
        simulate(trace, make_policy(name), capacity, hit_log=log)
        assert sum(log) <= best, name

"""The simulator agrees with libcachesim, cache by cache, on streams of single blocks.

Skipped if it is not installed: ``pip install -e .[rivals]``, which ``./run test`` does not run. The
streams consist of single blocks, because libcachesim does not know requests: a prompt there may
evict its own blocks.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.base import EvictionPolicy
from policies.eviction.arc import ArcPolicy
from policies.eviction.fifo import FifoPolicy
from policies.eviction.lru import LruPolicy
from policies.simulation.belady import optimum_hits
from policies.simulation.simulator import simulate
from policies.simulation.trace import Request, Trace

library: Any = pytest.importorskip(
    "libcachesim", reason="needs libcachesim: pip install -e .[rivals]"
)
CAPACITIES = (10, 60, 150)


def _stream(seed: int, length: int = 6000) -> list[int]:
    """Skewed uses whose favourites drift, with occasional scans."""
    rng = random.Random(seed)
    blocks: list[int] = []
    while len(blocks) < length:
        if rng.random() < 0.002:
            first = rng.randrange(10_000, 20_000)
            blocks += range(first, first + 80)
        blocks.append(int(10 * rng.paretovariate(0.7)) % 400 + len(blocks) // 1000 * 50)
    return blocks[:length]


def _trace(blocks: list[int]) -> Trace:
    return Trace("stream", 16, [Request(float(i), 16, ((b, 1),)) for i, b in enumerate(blocks)])


def _theirs(name: str, blocks: list[int], capacity: int) -> int:
    cache = getattr(library, name)(cache_size=capacity)
    following: dict[int, int] = {}
    next_use = [0] * len(blocks)
    for place in range(len(blocks) - 1, -1, -1):
        next_use[place] = following.get(blocks[place], 1 << 60)
        following[blocks[place]] = place
    access = library.Request()
    access.obj_size = 1
    hits = 0
    for place, block in enumerate(blocks):
        access.obj_id = block
        access.next_access_vtime = next_use[place]
        hits += bool(cache.get(access))
    return hits


def _ours(policy: EvictionPolicy, blocks: list[int], capacity: int) -> int:
    return simulate(_trace(blocks), policy, capacity).hit_blocks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("name", "policy"), [("LRU", LruPolicy), ("FIFO", FifoPolicy)])
def test_hits_are_equal(name: str, policy: type, capacity: int, seed: int) -> None:
    blocks = _stream(seed)
    assert _ours(policy(), blocks, capacity) == _theirs(name, blocks, capacity)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_arc_agrees_to_three_thousandths(capacity: int, seed: int) -> None:
    """Not exactly: the target size is a fraction, which the two implementations round differently.
    Our ARC equals a naive one exactly (``test_oracles``)."""
    blocks = _stream(seed)
    difference = _ours(ArcPolicy(), blocks, capacity) - _theirs("ARC", blocks, capacity)
    assert abs(difference) <= 0.003 * len(blocks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_optimum_is_beladys_plus_the_gain_of_bypass(capacity: int, seed: int) -> None:
    blocks = _stream(seed)
    gained = sum(optimum_hits(_trace(blocks), capacity)) - _theirs("Belady", blocks, capacity)
    assert 0 <= gained <= 0.02 * len(blocks)


@pytest.mark.parametrize("name", ["LRU", "FIFO", "ARC"])
def test_a_different_policy_is_detected(name: str) -> None:
    """On these streams different policies have different hits, so the agreement above is no
    coincidence."""
    blocks = _stream(0)
    others = {"LRU": FifoPolicy, "FIFO": LruPolicy, "ARC": LruPolicy}
    difference = _ours(others[name](), blocks, 60) - _theirs(name, blocks, 60)
    assert abs(difference) > 0.01 * len(blocks)

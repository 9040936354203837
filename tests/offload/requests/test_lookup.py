"""How a hit is divided into a part to load and a part that is faster to compute."""

from __future__ import annotations

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import UNKNOWN, ChunkBatch, GroupInfo, RequestOrigin
from offload.index.request_options import Controls
from offload.index.tier_index import TierIndex
from offload.layout.groups import FULL, GroupLayout, ModelLayout
from offload.layout.keys import group_suffix
from offload.layout.prefix_match import PrefixMatcher
from offload.planner.load_or_recompute import SAMPLES_MIN, STOP_BELOW
from offload.planner.planner import Planner
from offload.planner.tier_health import TierHealths
from offload.requests.lookup import Hit, tokens_to_load
from offload.requests.lookup_cache import PartialLookup
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

CHUNK = 16
CHUNKS = 40
RATE = 1000.0
"""Computed tokens per second."""
LAYOUT = ModelLayout(1024, 1, CHUNK, (GroupLayout(0, FULL, CHUNK, 1, ("layer",), 64),))
KEYS = [bytes([n]) + group_suffix(0) for n in range(CHUNKS)]


def planner_with(cpu: int, *below: int) -> Planner:
    """The first ``cpu`` chunks are in the CPU tier, the next ``below[0]`` in the first lower tier,
    and so on. Short loads from a lower tier take as long as computing 10 chunks."""
    holds = TierIndex("cpu", SlotCapacity(CHUNKS), LruPolicy())
    lower = [TierIndex(f"disk{n}", ByteCapacity(10**6), LruPolicy()) for n in range(len(below))]
    first = 0
    for index, count in zip((holds, *lower), (cpu, *below), strict=True):
        keys = KEYS[first : first + count]
        index.recover(keys, [EntryInfo(0, size_bytes=1)] * count)
        first += count
    gates = TierHealths([index.name for index in lower])
    planner = Planner({0: GroupInfo("full", CHUNK, (1,) * len(below))}, holds, lower, health=gates)
    for _ in range(SAMPLES_MIN):
        planner.health.computed(1000, 1000 / RATE)
    return planner


def slow(planner: Planner, tier: int) -> None:
    """A short load from this tier takes as long as computing ten chunks."""
    for _ in range(SAMPLES_MIN):
        planner.health[tier].loaded(CHUNK, 10 * CHUNK / RATE / STOP_BELOW, 0.0)


def hit(planner: Planner, start: int = 0, origin: RequestOrigin = UNKNOWN) -> Hit:
    first, limit = start * CHUNK, CHUNKS * CHUNK
    known = PartialLookup()
    return tokens_to_load(PrefixMatcher(LAYOUT), planner, [KEYS], first, limit, known, origin)


def chunks_to_load(planner: Planner, start: int = 0, origin: RequestOrigin = UNKNOWN) -> int:
    found = hit(planner, start, origin)
    assert found.end_tokens is not None
    return found.end_tokens // CHUNK


@pytest.mark.parametrize(
    ("cpu", "below", "loaded"),
    [
        (0, 9, 0),  # sooner computed
        (0, 10, 10),
        (20, 9, 20),  # the near part is loaded, the rest is computed
        (20, 10, 30),
        (3, 0, 3),  # nothing to read from the slow tier
    ],
)
def test_a_slow_tier_is_not_used_for_a_few_tokens(cpu: int, below: int, loaded: int) -> None:
    planner = planner_with(cpu, below)
    assert chunks_to_load(planner) == cpu + below, "the tier was not measured yet"
    slow(planner, 0)
    assert chunks_to_load(planner) == loaded
    assert hit(planner).is_shortened == (loaded < cpu + below)


def test_tokens_in_the_gpus_cache_do_not_count() -> None:
    planner = planner_with(0, 15)
    slow(planner, 0)
    assert chunks_to_load(planner) == 15
    assert chunks_to_load(planner, start=6) == 6


@pytest.mark.parametrize(("tokens", "loaded"), [(0, 2), (CHUNK - 1, 2), (3 * CHUNK, 5), (900, 9)])
def test_a_client_limits_what_is_loaded(tokens: int, loaded: int) -> None:
    planner = planner_with(9)
    origin = RequestOrigin(controls=Controls(max_load_tokens=tokens))
    assert chunks_to_load(planner, start=2, origin=origin) == loaded


def test_each_of_two_tiers_is_judged_separately() -> None:
    planner = planner_with(5, 20, 9)
    slow(planner, 1)
    assert chunks_to_load(planner) == 25
    planner = planner_with(5, 9, 9)
    slow(planner, 0)
    slow(planner, 1)
    assert chunks_to_load(planner) == 5
    planner = planner_with(5, 9, 20)
    slow(planner, 0)
    slow(planner, 1)
    assert chunks_to_load(planner) == 34, "the tier behind it is worth loading from"


def test_a_read_under_way_is_joined_from_any_tier() -> None:
    planner = planner_with(0, 9)
    slow(planner, 0)
    planner.loads.plan("r", [ChunkBatch(KEYS[:9], 0, list(range(9)), range(1, 10))])
    assert chunks_to_load(planner) == 9

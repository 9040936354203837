"""How a hit is divided into a part to load and a part that is faster to compute."""

from __future__ import annotations

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.groups import FULL, GroupLayout, ModelLayout
from offload.layout.keys import group_suffix
from offload.layout.prefix_match import PrefixMatcher
from offload.planner.load_or_recompute import DEADLINE_SHARE, SAMPLES_MIN, STOP_BELOW, ShortenReason
from offload.planner.planner import Planner
from offload.planner.tier_health import HealthLimits, TierHealths
from offload.requests.hit_search import Hit, HitSearch
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_state import RequestState
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

CHUNK = 16
CHUNKS = 40
RATE = 1000.0
"""Computed tokens per second."""
LAYOUT = ModelLayout(1024, CHUNK, CHUNK, (GroupLayout(0, FULL, CHUNK, 1, ("layer",), 64),))
HASHES = [bytes([n]) for n in range(CHUNKS)]
KEYS = [block_hash + group_suffix(0) for block_hash in HASHES]


def planner_with(cpu: int, *below: int, limits: HealthLimits | None = None) -> Planner:
    """The first ``cpu`` chunks are in the CPU tier, the next ``below[0]`` in the first lower tier,
    and so on. Short loads from a lower tier take as long as computing 10 chunks."""
    holds = TierIndex("cpu", SlotCapacity(CHUNKS), LruPolicy())
    lower = [TierIndex(f"disk{n}", ByteCapacity(10**6), LruPolicy()) for n in range(len(below))]
    first = 0
    for index, count in zip((holds, *lower), (cpu, *below), strict=True):
        keys = KEYS[first : first + count]
        index.recover(keys, [EntryInfo(0, size_bytes=1)] * count)
        first += count
    health = TierHealths([index.name for index in lower], limits)
    planner = Planner({0: GroupInfo("full", CHUNK, (1,) * len(below))}, holds, lower, health=health)
    for _ in range(SAMPLES_MIN):
        planner.health.computed(1000, 1000 / RATE)
    return planner


def slow(planner: Planner, tier: int) -> None:
    """A short load from this tier takes as long as computing ten chunks."""
    for _ in range(SAMPLES_MIN):
        planner.health[tier].loaded(CHUNK, 10 * CHUNK / RATE / STOP_BELOW, 0.0)


def request_state() -> RequestState:
    identity = RequestIdentity("r", LAYOUT)
    identity.extend(HASHES)
    return RequestState(identity)


def search_of(planner: Planner, computing: int = 0) -> HitSearch:
    return HitSearch(PrefixMatcher(LAYOUT), planner, planner.sources.holders, lambda: computing)


def hit(planner: Planner, start: int = 0, computing: int = 0) -> Hit:
    search = search_of(planner, computing)
    return search.longest(request_state(), start * CHUNK, CHUNKS * CHUNK)


def chunks_to_load(planner: Planner, start: int = 0) -> int:
    found = hit(planner, start)
    assert found.end_tokens is not None
    return found.end_tokens // CHUNK


def delivers(planner: Planner, tier: int, rate: float) -> None:
    """This tier delivers ``rate`` times as many tokens per second as can be computed."""
    for _ in range(SAMPLES_MIN):
        planner.health[tier].loaded(1000, 1000 / RATE / rate, 0.0)


@pytest.mark.parametrize(
    ("cpu", "below", "loaded"),
    [
        (0, 9, 0),  # faster to compute
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
    assert hit(planner).shorten_reason is (
        ShortenReason.SHORT if loaded < cpu + below else ShortenReason.NOTHING
    )


def test_tokens_in_the_gpus_cache_do_not_count() -> None:
    planner = planner_with(0, 15)
    slow(planner, 0)
    assert chunks_to_load(planner) == 15
    assert chunks_to_load(planner, start=6) == 6


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


@pytest.mark.parametrize(
    ("others", "computing", "loaded"),
    [
        ([], 0, 30),
        ([20, 20], 0, 20),  # a third of the speed is too slow
        ([20, 20], 6, 30),  # but not if the GPU has to compute for others first
        ([20, 20], 4, 20),
        ([8], 0, 30),  # the other load ends before
        ([8, 3], 0, 20),
        ([4, 4], 0, 30),
        ([4, 7], 0, 20),
    ],
)
def test_a_request_does_not_wait_behind_other_loads(
    others: list[int], computing: int, loaded: int
) -> None:
    """Ten chunks lie below the CPU tier. Without other loads, reading them takes half the time of
    computing them."""
    planner = planner_with(20, 10)
    delivers(planner, 0, 2 * STOP_BELOW)
    reads = planner.health[0].break_even.reads
    for job, chunks in enumerate(others):
        reads.begin(job, chunks * CHUNK)
    tokens = computing * CHUNK
    found = hit(planner, computing=tokens)
    assert found.end_tokens == loaded * CHUNK
    assert found.shorten_reason is (ShortenReason.QUEUE if loaded == 20 else ShortenReason.NOTHING)
    for job in range(len(others)):
        reads.end(job)
    assert hit(planner).end_tokens == 30 * CHUNK


def test_without_break_even_a_request_waits_behind_other_loads() -> None:
    planner = planner_with(20, 10, limits=HealthLimits(break_even=False))
    delivers(planner, 0, 0.1)
    planner.health[0].break_even.reads.begin(1, 10**6)
    assert hit(planner).end_tokens == 30 * CHUNK


@pytest.mark.parametrize(
    ("others", "loaded"),
    [
        ([], 15),
        ([12], 5 + 5),  # the two share the tier
        ([3], 5 + 7),  # the other load ends before
        ([20, 20], 5 + 3),
    ],
)
def test_the_part_of_a_long_prefix_that_can_be_read_in_time_is_loaded(
    others: list[int], loaded: int
) -> None:
    """Twenty-five chunks lie below the CPU tier, which holds five; ten can be read in time."""
    timeout_s = 10 * CHUNK / (2 * RATE) / DEADLINE_SHARE
    planner = planner_with(5, 25, limits=HealthLimits(load_timeout_s=timeout_s, break_even=False))
    assert chunks_to_load(planner) == 30, "the tier was not measured yet"
    delivers(planner, 0, 2)
    for job, chunks in enumerate(others):
        planner.health[0].break_even.reads.begin(job, chunks * CHUNK)
    found = hit(planner)
    assert found.end_tokens == loaded * CHUNK
    assert found.shorten_reason is ShortenReason.DEADLINE


def test_chunks_of_nearer_tiers_behind_the_first_gap_need_no_read() -> None:
    timeout_s = 10 * CHUNK / (2 * RATE) / DEADLINE_SHARE
    planner = planner_with(5, 25, limits=HealthLimits(load_timeout_s=timeout_s))
    delivers(planner, 0, 2)
    planner.cpu.recover(KEYS[15:30], [EntryInfo(0, size_bytes=1)] * 15)
    assert hit(planner) == Hit(30 * CHUNK)


@pytest.mark.parametrize(("cpu", "below"), [(5, 4), (0, 9), (9, 0), (0, 0)])
def test_what_is_in_the_cpu_tier_is_loaded_without_the_rest(cpu: int, below: int) -> None:
    planner = planner_with(cpu, below)
    search, why = search_of(planner), ShortenReason.LATE
    found = search.in_cpu_tier(request_state(), 0, CHUNKS * CHUNK, why)
    assert found == (Hit(cpu * CHUNK, why) if below else Hit(cpu * CHUNK))


def test_a_load_counts_until_its_request_stops_waiting() -> None:
    planner = planner_with(0, 9)
    reads = planner.health[0].break_even.reads
    batch = [ChunkBatch(KEYS[:9], 0, list(range(9)), range(1, 10))]
    planner.loads.plan("r", batch)
    assert reads.before(10**6) == 9 * CHUNK
    planner.loads.plan("r", batch)
    assert len(reads) == 0, "the chunks are being read already, so the second load reads nothing"
    planner.loads.request_ended("r")
    assert len(reads) == 0

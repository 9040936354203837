"""Lookups over several steps that remember their results, compared with lookups that query
everything."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.groups import FULL, WINDOW, GroupLayout, ModelLayout
from offload.layout.prefix_match import PrefixMatcher
from offload.messages.report import JobResult, StepReport
from offload.planner.planner import Planner
from offload.planner.step_budget import Allowance
from offload.requests import lookup_cache as known_prefix
from offload.requests.hit_search import HitSearch
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_state import RequestState
from offload.telemetry.removed_chunks import RemovalLog
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

CHUNK = 16
CHUNKS = 24
STEP = 5
LOOKUP_MIN = 2
ALONE = (GroupLayout(0, FULL, CHUNK, 1, ("layer",), 64),)
SEVERAL = (
    GroupLayout(0, FULL, CHUNK, 1, ("layer",), 64),
    GroupLayout(1, WINDOW, CHUNK, 1, ("window",), 64, window_tokens=40),
    GroupLayout(2, FULL, CHUNK, 2, ("wide",), 64),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prefix, "MATCH_BATCH", 3)


class ChangingTiers:
    """Tiers whose chunks come and go, and the lookups of one request that remember results."""

    def __init__(self, seed: int, groups: tuple[GroupLayout, ...] = ALONE) -> None:
        self.random = random.Random(seed)
        layout = ModelLayout(1024, CHUNK, max(g.chunk_tokens for g in groups), groups)
        self.matcher = PrefixMatcher(layout)
        self.identity = RequestIdentity("r", layout)
        self.identity.extend([bytes([n]) for n in range(CHUNKS)])
        self.keys = [list(keys) for keys in self.identity.keys]
        self.every = [key for keys in self.keys for key in keys]
        self.cpu = TierIndex("cpu", SlotCapacity(len(self.every)), LruPolicy())
        self.disk = TierIndex("disk", ByteCapacity(10**6), LruPolicy())
        self.other = TierIndex("other", ByteCapacity(10**6), LruPolicy())
        infos = {g.group: GroupInfo(g.kind, g.chunk_tokens, (1, 1)) for g in groups}
        self.planner = Planner(infos, self.cpu, [self.disk, self.other])
        self.allowance = self.planner.budget.lookups
        self.allowance.chunks, self.allowance.chunks_min = STEP, LOOKUP_MIN
        self.allowance.renew()
        self.search = HitSearch(self.matcher, self.planner, self.planner.sources.holders, lambda: 0)
        self.state = RequestState(self.identity)
        self.limit = CHUNKS * CHUNK
        self.loads: list[int] = []

    def put(self, index: TierIndex, keys: list[bytes]) -> None:
        new = [key for key in keys if index.is_absent(key)]
        index.recover(new, [EntryInfo(int(key[-1]), size_bytes=1) for key in new])

    def ask(self, start: int = 0, state: RequestState | None = None) -> int | None:
        state = self.state if state is None else state
        return self.search.longest(state, start, self.limit).end_tokens

    def truth(self, start: int = 0) -> int | None:
        """The result of a lookup without a cache and without bounds."""
        self.planner.budget.lookups = Allowance(10**6, chunks_min=10**6)
        try:
            return self.ask(start, RequestState(self.identity))
        finally:
            self.planner.budget.lookups = self.allowance

    def change(self) -> None:
        """A chunk enters or leaves, in one of the possible ways."""
        some = self.random.sample(self.every, self.random.choice([1, 1, 2, 6]))
        index = self.random.choice([self.cpu, self.disk, self.other])
        what = self.random.random()
        if what < 0.5:
            self.put(index, some)
        elif what < 0.7:
            index.drop(some)
        elif what < 0.8:
            index.evict(self.random.choice([1, 3]))
        elif what < 0.82:
            index.clear()
        elif what < 0.85:
            healths = list(self.planner.health.tiers)
            for health in self.random.sample(healths, self.random.choice([1, 2])):
                health.break_even.pays = not health.break_even.pays  # toggles the disk's use
        elif what < 0.92:
            self.load()
        else:
            self.end_load()

    def load(self) -> None:
        """Another request begins to read chunks that only the disk has."""
        keys = [k for k in self.keys[0] if k in self.disk and self.cpu.is_absent(k)][:4]
        if keys:
            name = f"r{self.random.random()}"
            blocks, depths = list(range(1, len(keys) + 1)), range(1, len(keys) + 1)
            self.planner.loads.plan(name, [ChunkBatch(keys, 0, blocks, depths)])
            self.loads += [load.job for load in self.planner.step().loads]

    def end_load(self) -> None:
        """The read ends, successfully or not, after the disk may have lost its chunks."""
        if self.loads:
            good = self.random.random() < 0.5
            result = JobResult() if good else JobResult(failed=True)
            self.planner.complete(StepReport({self.loads.pop(0): result}))
            self.planner.step()


def remembers_rightly(seed: int, groups: tuple[GroupLayout, ...]) -> int:
    """The number of results, each equal to that of a lookup without memory."""
    world = ChangingTiers(seed, groups)
    world.put(world.disk, world.every[: world.random.randrange(len(world.every))])
    answers = start = 0
    for step in range(200):
        world.allowance.renew()
        if world.random.random() < 0.4:
            world.change()
        if world.random.random() < 0.05:
            start = world.random.choice([0, CHUNK, 4 * CHUNK])
        if world.random.random() < 0.02:
            world.limit = world.random.randrange(CHUNK, CHUNKS * CHUNK + 1)
        found = world.ask(start)
        if found is not None:
            answers += 1
            assert found == world.truth(start), f"seed {seed}, step {step}"
    return answers


@pytest.mark.parametrize("groups", [ALONE, SEVERAL], ids=["alone", "several"])
@pytest.mark.parametrize("seed", range(40))
def test_remembered_results_equal_the_present_state(
    seed: int, groups: tuple[GroupLayout, ...]
) -> None:
    assert remembers_rightly(seed, groups) > 50


def _forget_to_note(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemovalLog, "note", lambda self, keys: None)


def _forget_to_note_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemovalLog, "note_all", lambda self: None)


def _do_not_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_prefix.KnownRange, "cut", lambda self, keys, gone: None)


def _any_holders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_prefix.KnownRange, "is_of", lambda self, first, holders: True)


def _as_many_holders(patch: pytest.MonkeyPatch) -> None:
    """One disk becomes unavailable while another becomes available again: the holders change, but
    not their number."""
    is_of = known_prefix.KnownRange.is_of
    patch.setattr(
        known_prefix.KnownRange,
        "is_of",
        lambda self, first, holders: (
            is_of(self, first, self.holders) and len(holders) == len(self.holders)
        ),
    )


def _trust_the_gap(patch: pytest.MonkeyPatch) -> None:
    extend = known_prefix.KnownRange.extend
    patch.setattr(
        known_prefix.KnownRange, "extend", lambda self, *a: 0 if self.has_gap else extend(self, *a)
    )


@pytest.mark.parametrize(
    "plant",
    [
        _forget_to_note,
        _forget_to_note_all,
        _do_not_cut,
        _any_holders,
        _as_many_holders,
        _trust_the_gap,
    ],
)
def test_planted_faults_are_detected(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        sum(remembers_rightly(seed, ALONE) for seed in range(40))


def test_a_failed_read_of_chunks_that_the_disk_has_lost_is_detected() -> None:
    """The chunks exist only in the read under way, which fails."""
    world = ChangingTiers(0)
    keys = world.keys[0][:4]
    world.put(world.disk, keys)
    world.load()
    world.disk.drop(keys)
    assert world.ask() == world.truth() == 4 * CHUNK, "the chunk is being read"
    world.planner.complete(StepReport({world.loads[0]: JobResult(failed=True)}))
    world.allowance.renew()
    assert world.ask() == world.truth() == 0


def test_a_failed_read_is_detected_before_its_slots_are_freed() -> None:
    """A step whose budget is used up leaves that to the next one; no lookup may rely on the
    chunks."""
    world = ChangingTiers(0)
    keys = world.keys[0][:8]
    world.put(world.disk, keys)
    world.planner.loads.plan("back", [ChunkBatch(keys[4:], 0, [5, 6, 7, 8], range(5, 9))])
    world.loads += [load.job for load in world.planner.step().loads]
    world.load()
    world.disk.drop(keys)
    while (found := world.ask()) is None:
        world.allowance.renew()
    assert found == world.truth() == 8 * CHUNK, "the chunks are being read"
    world.planner.budget.spend(10**6)
    failed = JobResult(failed=True)
    world.planner.complete(StepReport(dict.fromkeys(world.loads, failed)))
    assert world.cpu.filling_count == 4, "the first four of the prompt"
    world.allowance.renew()
    assert world.ask() == world.truth() == 0


def test_a_long_prompt_takes_several_steps_and_queries_each_chunk_once() -> None:
    world = ChangingTiers(0)
    world.put(world.disk, world.every)
    steps = 1
    while (found := world.ask()) is None:
        world.allowance.renew()
        steps += 1
    assert found == CHUNKS * CHUNK
    assert steps == -(-CHUNKS // STEP)
    world.allowance.renew()
    assert world.ask() == CHUNKS * CHUNK
    assert world.allowance.left == STEP, "a chunk was queried again"


def test_several_long_prompts_share_a_step() -> None:
    world = ChangingTiers(0)
    world.put(world.disk, world.every)
    assert world.ask() is None
    left = world.allowance.left
    world.state = RequestState(world.identity)
    assert world.ask() is None, "another request"
    assert left - world.allowance.left == LOOKUP_MIN, "it may still query a few chunks"


@pytest.mark.parametrize("most", [3, 10**6])
def test_a_request_does_not_wait_forever_while_many_chunks_leave(most: int) -> None:
    """Between any two steps, more chunks leave the tiers than the log of removals keeps."""
    world = ChangingTiers(0)
    world.planner.removals._keys_max = most
    world.put(world.disk, world.every)
    steps = 0
    while (found := world.ask()) is None:
        steps += 1
        assert steps < 4 * CHUNKS, "it waits forever"
        world.put(world.cpu, world.every[:4])
        world.cpu.evict(4)
        world.allowance.renew()
    assert found == CHUNKS * CHUNK


def test_removals_are_remembered_for_a_while() -> None:
    removals = RemovalLog(4)
    removals.note([b"a", b"b"])
    mark = removals.count
    assert removals.since(mark) == []
    removals.note([b"c"])
    assert removals.since(mark) == [(b"c",)]
    assert removals.since(0) == [(b"c",), (b"a", b"b")]
    removals.note([b"d", b"e"])
    assert removals.since(0) is None, "the log no longer contains the first two"
    assert removals.since(mark) == [(b"d", b"e"), (b"c",)]
    removals.note(list(map(str.encode, "fghij")))
    assert removals.since(mark) is None
    assert removals.since(removals.count) == []
    mark = removals.count
    removals.note_all()
    assert removals.since(mark) is None
    assert removals.since(removals.count) == []

"""A disk that is slower than stores does not keep new chunks out of the CPU tier; a disk that keeps
up receives all of a prompt that is longer than the CPU tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.messages.report import JobResult, StepReport
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import WriteThroughQueue
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

SLOTS = 100
PER_STEP = 8


def keys_of(prompt: int, chunks: int) -> list[bytes]:
    return [b"%04d%04d" % (prompt, n) + bytes(4) for n in range(chunks)]


class Line:
    """Prompts run one after the other over a CPU tier and a disk that writes ``rate`` chunks per
    step (0: there is no disk). A step computes ``PER_STEP`` chunks."""

    def __init__(self, rate: float, slots: int = SLOTS) -> None:
        cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        disk = TierIndex("disk", ByteCapacity(1 << 30), LruPolicy())
        self.planner = Planner(
            {0: GroupInfo("full", 16, (1,))},
            cpu,
            [disk] if rate else [],
            PlannerSettings(WorkLimits(store_chunks=slots // 4, waiting_writes=slots)),
        )
        self.rate = rate
        self.left = 0.0
        self.writes: list[tuple[int, int]] = []
        self.hits = 0

    def step(self) -> None:
        plan = self.planner.step()
        self.writes += [(job.job, len(job.keys)) for job in plan.write_throughs]
        self.left = min(self.left + self.rate, max(self.rate, 1.0) if not self.writes else 1e9)
        done = {store.job: JobResult() for store in plan.stores}
        while self.writes and self.writes[0][1] <= self.left:
            job, chunks = self.writes.pop(0)
            self.left -= chunks
            done[job] = JobResult()
        self.planner.complete(StepReport(done))
        self.planner.check()

    def serve(self, prompt: int, chunks: int, decodes: int = 8) -> int:
        """Run a prompt; return how many of its chunks, counted from its head, were in the CPU
        tier."""
        keys = keys_of(prompt, chunks)
        hit = 0
        while hit < chunks and keys[hit] in self.planner.cpu:
            hit += 1
        self.hits += hit
        next_chunk, computed = 0, hit
        self.own = self.planner.stores.own_chunks()
        for _ in range(-(-(chunks - hit) // PER_STEP) + decodes):
            computed = min(chunks, computed + PER_STEP)
            next_chunk += self._store(keys, next_chunk, computed)
            self.step()
        self._store(keys, next_chunk, chunks, ended=True)
        self.planner.uses.ended(keys)
        self.step()
        return hit

    def _store(self, keys: list[bytes], first: int, end: int, *, ended: bool = False) -> int:
        if first == end:
            return 0
        depths = range(16 * (first + 1), 16 * (end + 1), 16)
        run = ChunkBatch(keys[first:end], 0, list(range(first, end)), depths)
        may_wait = self.planner.stores.may_wait(len(run))
        return self.planner.stores.plan(run, self.own, ended=ended, may_wait=may_wait)

    def left_of(self, prompt: int, chunks: int) -> int:
        """The number of chunks, counted from the head, that the CPU tier holds."""
        held = [key in self.planner.cpu for key in keys_of(prompt, chunks)]
        return [*held, False].index(False)

    def loadable(self, prompt: int, chunks: int) -> int:
        """Chunks from the head on that some tier holds."""
        present = self.planner.sources.present
        return [*map(present, keys_of(prompt, chunks)), False].index(False)


@pytest.mark.parametrize("rate", [0.1, 0.8, 2.0])
@pytest.mark.parametrize("share", [4 / 3, 5.0])
def test_the_newest_prompts_stay_in_the_cpu_tier_over_a_slow_disk(
    rate: float, share: float
) -> None:
    chunks = int(SLOTS / share)
    slow, none = Line(rate), Line(0.0)
    for prompt in range(6):
        for line in (slow, none):
            line.serve(prompt, chunks)
        assert none.left_of(prompt, chunks) == chunks
        assert slow.left_of(prompt, chunks) == chunks, f"prompt {prompt}"


def test_hits_over_a_disk_of_a_tenth_of_the_store_rate_equal_those_without_a_disk() -> None:
    """Prompts that are repeated while others pass through: LRU keeps them, with and without a
    disk."""
    slow, none = Line(PER_STEP / 10), Line(0.0)
    for turn in range(40):
        for line in (slow, none):
            line.serve(turn % 2, 20, decodes=1)
            line.serve(100 + turn, 16, decodes=1)
    assert none.hits == 38 * 20
    assert slow.hits >= 0.99 * none.hits
    assert slow.planner.totals()["writes_given_up:disk"] > 0


@pytest.mark.parametrize("decodes", [8, 60])
def test_a_prompt_longer_than_the_cpu_tier_is_complete_on_a_disk_that_keeps_up(
    decodes: int,
) -> None:
    line = Line(2 * PER_STEP)
    line.serve(0, 3 * SLOTS, decodes)
    for _ in range(40):
        line.step()
    disk = line.planner.lower[0]
    assert sum(key in disk for key in keys_of(0, 3 * SLOTS)) == 3 * SLOTS
    assert line.planner.totals()["writes_given_up:disk"] == 0


def test_stores_wait_for_a_disk_that_lags_only_slightly() -> None:
    """A waiting store does not cancel a write as long as its request could still store the chunk at
    its end."""
    line = Line(2.0)
    line.serve(0, SLOTS, decodes=0)
    assert line.planner.cpu.unwritten, "the disk lags"
    line.serve(1, 3 * PER_STEP, decodes=80)
    assert line.planner.totals()["writes_given_up:disk"] == 0
    assert not line.planner.cpu.unwritten.is_behind


@pytest.mark.parametrize("rate", [0.0, 0.5, 4.0, 16.0])
@pytest.mark.parametrize("per_step", [8, 32])
@pytest.mark.parametrize("chunks", [95, 150, 300])
def test_a_long_prompt_does_not_evict_its_own_head(
    rate: float, per_step: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts run in a row. The part of each prompt that stays is about as long as the CPU
    tier, whether there is no disk, a slow disk, or a disk that keeps up. Chunks that the disk
    writes in the meantime are kept as well."""
    monkeypatch.setattr(f"{__name__}.PER_STEP", per_step)
    line = Line(rate)
    for prompt in range(4):
        line.serve(prompt, chunks)
        least = min(chunks, SLOTS if not rate else SLOTS - SLOTS // 4)
        assert line.loadable(prompt, chunks) >= least, f"prompt {prompt}"
        if rate >= per_step:
            assert line.loadable(prompt, chunks) == chunks


def full_of_its_own(rate: float) -> tuple[Line, list[bytes]]:
    """A request whose first chunks fill the CPU tier, and all its keys."""
    line = Line(rate)
    line.own = line.planner.stores.own_chunks()
    keys, stored = keys_of(0, SLOTS + 8), 0
    while stored < SLOTS:
        stored += line._store(keys, stored, SLOTS)
        line.step()
    line.step()
    return line, keys


def test_a_request_that_fills_the_tier_does_not_stop_others() -> None:
    line, keys = full_of_its_own(0.0)
    assert line._store(keys, SLOTS, SLOTS + 8) == 0, "it would evict its own head"
    assert line.planner.totals()["evicted_chunks:cpu"] == 0
    line.own = line.planner.stores.own_chunks()
    assert line._store(keys_of(1, 8), 0, 8) == 8, "in the same step, another request"


def test_after_two_requests_without_a_victim_the_step_searches_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No chunk can be evicted; not every running request may examine all of them in each step."""
    line, keys = full_of_its_own(0.0)
    line.planner.cpu.retention.register_client_pins(frozenset(keys))
    searches = []
    victims = line.planner.cpu.policy.victims

    def counted(*given: Any) -> list[Any]:
        searches.append(given)
        return victims(*given)

    monkeypatch.setattr(line.planner.cpu.policy, "victims", counted)
    for prompt in range(1, 9):
        line.own = line.planner.stores.own_chunks()
        line.own.add(keys_of(prompt, 1))
        assert line._store(keys_of(prompt, 8), 1, 8) == 0
    assert len(searches) == 2


def test_a_request_may_evict_its_own_chunks_that_are_on_disk() -> None:
    line, keys = full_of_its_own(0.01)
    for _ in range(3):
        assert line._store(keys, SLOTS, SLOTS + 8) == 0
        line.step()
    line.rate = 100.0
    for _ in range(8):
        line.step()
    assert line._store(keys, SLOTS, SLOTS + 8) == 8
    line.step()
    assert line.loadable(0, SLOTS + 8) == SLOTS + 8


def test_once_the_disk_has_written_everything_stores_wait_for_it_again() -> None:
    line = Line(0.2)
    line.serve(0, 2 * SLOTS)
    line.serve(1, 2 * SLOTS)
    assert line.planner.cpu.unwritten.is_behind
    line.rate = 100.0
    for _ in range(60):
        line.step()
    assert not line.planner.cpu.unwritten.is_behind
    assert not line.planner.cpu.unwritten


def test_an_abandoned_write_is_made_when_its_chunk_is_stored_again() -> None:
    line = Line(0.1)
    line.serve(0, 40)
    line.serve(1, 2 * SLOTS)
    assert line.planner.totals()["writes_given_up:disk"] > 0
    assert line.left_of(0, 40) < 40
    line.rate = 100.0
    for _ in range(60):
        line.step()
    line.serve(0, 40)
    for _ in range(60):
        line.step()
    assert all(key in line.planner.lower[0] for key in keys_of(0, 40))


def test_queued_chunks_that_were_evicted_do_not_pile_up() -> None:
    """The queue stays short even if the disk takes so long for its first write that no queued chunk
    is examined."""
    line = Line(1e-4)
    for prompt in range(60):
        line.serve(prompt, 60, decodes=2)
    (queue,) = line.planner.write_through.queues
    assert queue.depth > len(queue)
    assert len(queue) <= 3 * SLOTS


def planner_over_disk() -> tuple[TierIndex, WriteThroughQueue]:
    """The CPU tier of a planner, and its queue for the disk."""
    cpu = TierIndex("cpu", SlotCapacity(SLOTS), LruPolicy())
    disk = TierIndex("disk", ByteCapacity(1 << 30), LruPolicy())
    planner = Planner({0: GroupInfo("full", 16, (1,))}, cpu, [disk])
    return cpu, planner.write_through.queues[0]


def store_and_queue(cpu: TierIndex, queue: WriteThroughQueue, keys: list[bytes]) -> None:
    infos = [EntryInfo(0, "full", size_bytes=1)] * len(keys)
    cpu.reserve(keys, infos)
    queue.offer(cpu.commit(keys, infos), infos)


def test_a_chunk_that_is_stored_again_while_its_first_entry_waits_is_written_once() -> None:
    """If it occurred twice in one write, the planning of the step ended with an error."""
    cpu, queue = planner_over_disk()
    store_and_queue(cpu, queue, keys_of(0, 8))
    cpu.evict(4)
    store_and_queue(cpu, queue, [key for key in keys_of(0, 8) if key not in cpu])
    jobs, _ = queue.due()
    assert sorted(key for job in jobs for key in job.keys) == keys_of(0, 8)
    assert not len(queue)


@pytest.mark.parametrize("leave", [lambda cpu: cpu.drop(keys_of(0, 4)), TierIndex.clear])
def test_a_chunk_that_is_dropped_while_it_waits_is_not_written(
    leave: Callable[[TierIndex], object],
) -> None:
    cpu, queue = planner_over_disk()
    store_and_queue(cpu, queue, keys_of(0, 8))
    leave(cpu)
    jobs, _ = queue.due()
    assert {key for job in jobs for key in job.keys} == set(cpu.resident)
    assert not len(queue)
    assert not cpu.unwritten.given_up[0]

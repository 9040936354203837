"""A small seeded world around the planner: ranks that execute plans late, out of order and with
faults, and a content model that reveals every wrong byte.

The content of a GPU block, a slot or a record is a value ``(key, generation)``; a block that was
reused has other content. A load that reports success with any other content than its key's is a
mismatch. It shares no code with the executor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.messages.plan import IN_SLAB, STAGED, LoadJob, StoreJob, WriteThroughJob
from offload.messages.report import JobResult, StepReport
from offload.planner.planner import Planner, PlannerSettings
from policies.eviction.lru import LruPolicy

Content = tuple[bytes, int] | None
GROUP = 0


def key_of(number: int) -> bytes:
    """A key of group 0."""
    return number.to_bytes(8, "big") + GROUP.to_bytes(4, "big")


def _batch(numbers: list[int], first_block: int) -> ChunkBatch:
    blocks = list(range(first_block, first_block + len(numbers)))
    return ChunkBatch([key_of(n) for n in numbers], GROUP, blocks, [16 * (n + 1) for n in numbers])


@dataclass
class Rank:
    """One worker: the content of its slots and its disk, and the jobs that it has not done."""

    slots: dict[int, Content] = field(default_factory=dict)
    disk: dict[bytes, Content] = field(default_factory=dict)
    todo: list[object] = field(default_factory=list)
    promises: dict[int, bool] = field(default_factory=dict)  # slot -> the last read into it


class PlannerWithRanks:
    """Planner, ranks and GPU blocks under one seed."""

    def __init__(self, seed: int, ranks: int = 2, slots: int = 6, disk_chunks: int = 10) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        groups = {GROUP: GroupInfo("full", 16, (100,))}
        cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        disk = TierIndex("disk", ByteCapacity(disk_chunks * 100), LruPolicy(), low_watermark=0.8)
        self.planner = Planner(groups, cpu, [disk], PlannerSettings(ranks=ranks))
        self.ranks = [Rank() for _ in range(ranks)]
        self.blocks: dict[int, Content] = {}
        self.generation = 0
        self.results: dict[int, list[JobResult]] = {}
        self.requests = 0
        self.loaded = 0
        self.mismatches: list[str] = []
        self.fault_rate = 0.15

    # -- actions of a scheduler --------------------------------------------------------------

    def store(self, numbers: list[int], first_block: int, *, late: bool = False) -> None:
        """Compute chunks into new blocks and plan to store them; if ``late``, in a later step."""
        blocks = range(first_block, first_block + len(numbers))
        self.give_away(list(blocks))
        for number, block in zip(numbers, blocks, strict=True):
            self.blocks[block] = (key_of(number), self.generation)
        if late:
            self.planner.stores.late_stores.add(_batch(numbers, first_block), None)
        else:
            self.planner.stores.plan(_batch(numbers, first_block))

    def give_away(self, blocks: list[int]) -> None:
        """Reuse blocks for new content: fence first, as vLLM's next step would."""
        self.planner.stores.fence(blocks)
        self.step()
        for block in blocks:
            self.blocks[block] = None

    def load(self, numbers: list[int], first_block: int) -> None:
        """Restore the longest present prefix of ``numbers``."""
        hit = []
        for number in numbers:
            if not any(key_of(number) in holder for holder in self.planner.sources.holders()):
                break
            hit.append(number)
        if hit:
            self.requests += 1
            self.planner.stores.fence(range(first_block, first_block + len(hit)))
            self.planner.loads.plan(f"r{self.requests}", [_batch(hit, first_block)])
            self.step()

    def reset(self) -> None:
        """Change the weights: from now on the same keys mean other content."""
        self.generation += 1
        self.planner.forget_all()
        self.planner.begin_epochs({0: self.generation})
        self.step()

    def step(self) -> None:
        """Send a plan to every rank."""
        self.planner.stores.plan_late()
        plan = self.planner.step()
        for rank in self.ranks:
            self._fence(rank, plan.fence)
            if plan.reset:
                self._reset(rank)
            for keys in plan.deletes.values():
                for key in keys:
                    rank.todo.append(("delete", key))
            rank.todo += [*plan.stores, *plan.write_throughs, *plan.loads]

    # -- actions of workers ------------------------------------------------------------------

    def work(self) -> None:
        """Let one rank do one job; jobs of different kinds overtake each other, but disk writes and
        deletes do not."""
        rank = self.random.choice(self.ranks)
        if not rank.todo:
            return
        job = self.random.choice(rank.todo)
        if isinstance(job, WriteThroughJob | tuple):
            job = next(j for j in rank.todo if isinstance(j, WriteThroughJob | tuple))
        elif isinstance(job, LoadJob) and self._waits_for_other(rank, job):
            return
        rank.todo.remove(job)
        self._do(rank, job)

    def report(self) -> None:
        """Report some of the finished jobs to the planner."""
        ids = [job for job in self.results if self.random.random() < 0.7]
        report = StepReport()
        for job in ids:
            for result in self.results.pop(job):
                report = report.merge(StepReport({job: result}))
        self.planner.complete(report)

    def drain(self) -> None:
        """Let everything end."""
        for _ in range(10_000):
            if not (self.planner.busy or any(rank.todo for rank in self.ranks)):
                return
            self.step()
            self.work()
            self.report()
        raise AssertionError(f"seed {self.seed}: the world does not come to rest")

    def _do(self, rank: Rank, job: object) -> None:
        if isinstance(job, tuple):
            rank.disk.pop(job[1], None)
        elif isinstance(job, StoreJob):
            self._store(rank, job)
        elif isinstance(job, WriteThroughJob):
            self._write_through(rank, job)
        elif isinstance(job, LoadJob):
            self._load(rank, job)

    def _answer(self, job: int, result: JobResult) -> None:
        self.results.setdefault(job, []).append(result)

    def _fault(self) -> bool:
        return self.random.random() < self.fault_rate

    def _store(self, rank: Rank, job: StoreJob) -> None:
        failed = self._fault()
        for block, slot in zip(job.blocks, job.slots, strict=True):
            rank.slots[slot] = None if failed else self.blocks[block]
            rank.promises.pop(slot, None)
        self._answer(job.job, JobResult(failed=failed))

    def _write_through(self, rank: Rank, job: WriteThroughJob) -> None:
        bad = set()
        for key, slot in zip(job.keys, job.slots, strict=True):
            if self._fault():
                bad.add(key)
            else:
                rank.disk.setdefault(key, rank.slots[slot])
        self._answer(job.job, JobResult(bad=frozenset(bad)))

    def _waits_for_other(self, rank: Rank, load: LoadJob) -> bool:
        """A joined load runs after the load that fills its slot."""
        mine = {item.slot for item in load.items if item.tier == IN_SLAB}
        for job in rank.todo:
            if job is load:
                return False
            if isinstance(job, LoadJob) and any(
                item.tier != IN_SLAB and item.slot in mine for item in job.items
            ):
                return True
        return False

    def _load(self, rank: Rank, job: LoadJob) -> None:
        bad, lost, got = set(), set(), {}
        for item in job.items:
            if item.tier == IN_SLAB and item.slot == STAGED:
                bad.add(item.key)
            elif item.tier == IN_SLAB:
                if not rank.promises.get(item.slot, True):
                    bad.add(item.key)
                got[item.key] = rank.slots.get(item.slot)
            else:
                missing = item.key not in rank.disk
                faulty = self._fault()
                if missing or faulty:
                    bad.add(item.key)
                    if missing or self.random.random() < 0.5:
                        lost.add(item.key)
                content = None if missing or faulty else rank.disk[item.key]
                if item.slot != STAGED:
                    rank.slots[item.slot] = content
                    rank.promises[item.slot] = not (missing or faulty)
                got[item.key] = content
        if not bad:
            self._compare(job, got)
        self._answer(job.job, JobResult(bad=frozenset(bad), lost=frozenset(lost)))

    def _compare(self, job: LoadJob, got: dict[bytes, Content]) -> None:
        self.loaded += len(got)
        for key, content in got.items():
            if content is None or content[0] != key:
                self.mismatches.append(f"seed {self.seed}: {key.hex()} loaded as {content}")

    def _fence(self, rank: Rank, jobs: tuple[int, ...]) -> None:
        for job in [j for j in rank.todo if isinstance(j, StoreJob) and j.job in jobs]:
            rank.todo.remove(job)
            self._do(rank, job)

    def _reset(self, rank: Rank) -> None:
        """Writes before a reset belong to the old epoch; loads in progress fail."""
        for job in list(rank.todo):
            if isinstance(job, WriteThroughJob | tuple):
                rank.todo.remove(job)
                self._do(rank, job)
            elif isinstance(job, LoadJob):
                rank.todo.remove(job)
                for item in job.items:
                    if item.tier != IN_SLAB and item.slot != STAGED:
                        rank.promises[item.slot] = False
                self._answer(job.job, JobResult(failed=True))
        rank.disk.clear()

"""Jobs that workers have not finished, and the GPU blocks they read.

A job is opened once, answered once by each rank, and closed when the last rank has answered. Late
answers to jobs that are no longer open (from a worker that was restarted) are counted and ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from offload.errors import InvariantError
from offload.index.chunk_batch import chosen
from offload.layout.keys import CPU
from offload.messages.report import JobResult
from policies.base import EntryInfo


class JobKind(enum.Enum):
    """The direction in which a job moves chunks."""

    STORE = "store"
    LOAD = "load"
    WRITE_THROUGH = "write-through"
    PROBE = "probe"
    AHEAD = "read ahead"

    __hash__ = object.__hash__  # members are singletons; ``Enum``'s hash is a Python function


@dataclass(slots=True, eq=False)
class LoadTokens:
    """The tokens of a load by source tier (``CPU`` or the lower tier's number): an estimate until
    every part of the load is planned. The load planner sets the mapping, which itself never
    changes. ``seconds`` is the load's time on the slowest rank, once it has ended."""

    by_tier: Mapping[int, int] = field(default_factory=dict)
    seconds: float | None = None

    def set(self, by_tier: Mapping[int, int]) -> None:
        """Replace the mapping."""
        self.by_tier = by_tier

    def ended(self, seconds: float) -> None:
        """Record how long the load took."""
        self.seconds = seconds


Pins = tuple[int, Sequence[bytes]]
"""A tier's number and the keys pinned in that tier."""


@dataclass(slots=True, eq=False)
class Job:
    """One job and the resources that it holds. The ``JobTable`` writes ``result`` and
    ``distrusted``; the part of the planner that opens the job writes the other fields.

    ``fills`` are reserved keys of tier ``fill_tier``; ``pins`` are pinned keys by tier; ``blocks``
    are GPU blocks that a store reads, ``holds`` counts the GPU blocks that a load fills; ``write``
    are the lower tiers to which the chunks of a store may be written (``None``: all); ``infos`` are
    the facts about ``fills`` for the policy of their tier. The fills of a ``distrusted`` job are
    never committed, whatever the ranks answer.
    """

    job: int
    kind: JobKind
    fills: Sequence[bytes] = ()
    fill_tier: int = CPU
    pins: Sequence[Pins] = ()
    blocks: Sequence[int] = ()
    request: str = ""
    chunks: int = 0
    holds: int = 0
    tokens: LoadTokens | None = None
    write: frozenset[int] | None = None
    infos: Sequence[EntryInfo] = ()
    result: JobResult | None = None
    distrusted: bool = False

    @property
    def answer(self) -> JobResult:
        """The combined answer of all ranks to a job that has ended."""
        if self.result is None:
            raise InvariantError(f"job table: job {self.job} ended without an answer")
        return self.result

    @property
    def tokens_by_tier(self) -> Mapping[int, int]:
        """The tokens that a load or a probe reads from each tier."""
        return self.tokens.by_tier if self.tokens is not None else {}

    def verdict(self) -> tuple[list[bytes], list[bytes]]:
        """The keys filled by an ended job that may be committed, and those that must not."""
        if self.answer.failed or self.distrusted:
            return [], list(self.fills)
        bad = self.answer.bad
        if not bad:
            return list(self.fills), []
        return [k for k in self.fills if k not in bad], [k for k in self.fills if k in bad]

    def infos_of(self, keys: Sequence[bytes]) -> Sequence[EntryInfo]:
        """The ``infos`` of these keys, which are some of ``fills``, in the same order."""
        if len(keys) == len(self.fills):
            return self.infos
        wanted = set(keys)
        return chosen(self.infos, [key in wanted for key in self.fills])


class JobTable:
    """The open jobs by id, and the open stores that still read each GPU block."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._next = 1
        self._jobs: dict[int, Job] = {}
        self._readers: dict[int, tuple[int, ...]] = {}
        self.late_answers = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ended(self) -> int:
        """A count that grows whenever a job ends."""
        return self._next - len(self._jobs)

    def next_id(self) -> int:
        """A job id that was never used before."""
        self._next += 1
        return self._next - 1

    def open(self, job: Job) -> None:
        """Enter a new job."""
        if job.job in self._jobs:
            raise InvariantError(f"job table: job {job.job} is open already")
        self._jobs[job.job] = job
        if job.blocks:
            readers = self._readers
            own: tuple[int, ...] = (job.job,)
            mine = dict.fromkeys(job.blocks, own)
            if not readers.keys().isdisjoint(mine):
                mine = {block: readers.get(block, ()) + own for block in mine}
            readers.update(mine)

    def close(self, job_id: int) -> Job:
        """Remove a job, whatever its answers."""
        job = self._jobs.pop(job_id)
        if blocks := set(job.blocks):
            found = list(map(self._readers.pop, blocks))
            if found.count((job_id,)) < len(found):
                for block, readers in zip(blocks, found, strict=True):
                    others = tuple(reader for reader in readers if reader != job_id)
                    if others:
                        self._readers[block] = others
        return job

    def answer(self, job_id: int, result: JobResult) -> Job | None:
        """Add the ranks' answers; return the job, which is then closed, once every rank has
        answered."""
        job = self._jobs.get(job_id)
        if job is None:
            self.late_answers += 1
            return None
        job.result = job.result.merge(result) if job.result else result
        if job.result.ranks < self._ranks:
            return None
        if job.result.ranks > self._ranks:
            raise InvariantError(
                f"job table: {job.kind.value} job {job_id} has {job.result.ranks} answers "
                f"from {self._ranks} ranks"
            )
        return self.close(job_id)

    def readers(self, blocks: Iterable[int]) -> set[int]:
        """The open stores that read any of these GPU blocks."""
        if not self._readers:
            return set()
        return set(chain.from_iterable(set(filter(None, map(self._readers.get, blocks)))))

    def distrust(self, kind: JobKind) -> None:
        """Do not commit anything that open jobs of this kind fill."""
        for job in self._jobs.values():
            if job.kind is kind:
                job.distrusted = True

    def distrust_all(self, jobs: Iterable[int]) -> None:
        """Do not commit anything that these open jobs fill."""
        for job in jobs:
            self._jobs[job].distrusted = True

    def count(self, kind: JobKind) -> int:
        """The number of open jobs of a kind."""
        return sum(1 for job in self._jobs.values() if job.kind is kind)

    def jobs(self) -> list[Job]:
        """The open jobs, oldest first."""
        return list(self._jobs.values())

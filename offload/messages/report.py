"""The reports that a rank sends to the scheduler side.

The first report is the rank's state after the start. The report of each step then contains the jobs
that have ended and the health of the rank's tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.namespaces.manifest import Namespace
from tiers.base import KeyColumn
from tiers.copy.base import CopyPathInfo


@dataclass(frozen=True, slots=True)
class Observed:
    """The results of operations of one lower tier.

    Counts the operations that succeeded in time, those that failed or were late, and how often the
    tier has lost all its records. ``damaged`` has the keys of damaged records that the tier found
    by itself, without a read.
    """

    reads_good: int = 0
    reads_failed: int = 0
    writes_good: int = 0
    writes_failed: int = 0
    losses: int = 0
    damaged: frozenset[bytes] = frozenset()

    def merge(self, other: Observed) -> Observed:
        """The sum of two reports."""
        return Observed(
            self.reads_good + other.reads_good,
            self.reads_failed + other.reads_failed,
            self.writes_good + other.writes_good,
            self.writes_failed + other.writes_failed,
            self.losses + other.losses,
            self.damaged | other.damaged,
        )


@dataclass(slots=True)
class JobResult:
    """The result of one job on the ranks that have answered so far.

    ``bad`` are the keys that failed. For a load, ``lost`` is the part of ``bad`` that the tier no
    longer holds intact (missing or ``corrupt``): those keys must be forgotten. ``late`` means that
    the load took longer than its request may wait, and ``seconds`` is its time on the slowest rank.
    ``mismatched`` contains keys whose bytes differ from those computed, from any source
    (`offload.worker.block_verifier`): no tier may provide them again.
    """

    ranks: int = 1
    bad: frozenset[bytes] = frozenset()
    lost: frozenset[bytes] = frozenset()
    failed: bool = False
    seconds: float = 0.0
    corrupt: frozenset[bytes] = frozenset()
    late: bool = False
    mismatched: frozenset[bytes] = frozenset()

    def merge(self, other: JobResult) -> JobResult:
        """The sum of two ranks' answers."""
        return JobResult(
            self.ranks + other.ranks,
            self.bad | other.bad,
            self.lost | other.lost,
            self.failed or other.failed,
            max(self.seconds, other.seconds),
            self.corrupt | other.corrupt,
            self.late or other.late,
            self.mismatched | other.mismatched,
        )


@dataclass(frozen=True, slots=True)
class PresenceReply:
    """The presence of a query's keys in a shared tier, on the ``ranks`` that replied: one byte per
    key, which is 1 if all these ranks have their parts. ``None``: at least one rank could not
    reply."""

    present: bytes | None
    ranks: int = 1

    def merge(self, other: PresenceReply) -> PresenceReply:
        """Combine two replies: a chunk is present only if every rank has it."""
        ranks = self.ranks + other.ranks
        if self.present is None or other.present is None:
            return PresenceReply(None, ranks)
        both = int.from_bytes(self.present) & int.from_bytes(other.present)
        return PresenceReply(both.to_bytes(len(self.present)), ranks)


@dataclass(slots=True)
class StepReport:
    """The events since the last report: ended jobs by job id, the health of lower tiers by number
    and rank, replies by the query's number, and the number of usable slots of the CPU tier by rank,
    if it has grown."""

    results: dict[int, JobResult] = field(default_factory=dict)
    tiers: dict[tuple[int, int], Observed] = field(default_factory=dict)
    answers: dict[int, PresenceReply] = field(default_factory=dict)
    usable: dict[int, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """True if the report contains nothing."""
        return not (self.results or self.tiers or self.answers or self.usable)

    def add_observed(self, tier: int, rank: int, seen: Observed) -> None:
        """Add a rank's observation of a tier."""
        mine = self.tiers.get((tier, rank))
        self.tiers[tier, rank] = mine.merge(seen) if mine else seen

    def merge(self, other: StepReport) -> StepReport:
        """The sum of two ranks' reports; used to aggregate over ranks."""
        merged = dict(self.results)
        for job, result in other.results.items():
            mine = merged.get(job)
            merged[job] = mine.merge(result) if mine else result
        usable = self.usable | other.usable
        report = StepReport(merged, dict(self.tiers), dict(self.answers), usable)
        for (tier, rank), seen in other.tiers.items():
            report.add_observed(tier, rank, seen)
        for number, answer in other.answers.items():
            report.answers[number] = merged_answer(report.answers.get(number), answer)
        return report


def merged_answer(one: PresenceReply | None, other: PresenceReply) -> PresenceReply:
    """Combine an answer with earlier answers, if there are any."""
    return other if one is None else one.merge(other)


@dataclass(frozen=True, eq=False)
class RankTier:
    """One lower tier of one rank after it was opened.

    ``footprints`` are bytes by group id. ``keys`` are its records, least recently used first. The
    keys travel as columns, in one piece unless their lengths differ: pickling a million single
    objects takes most of a second. A ``shared`` tier lists no keys: the scheduler queries it.
    """

    name: str
    capacity_bytes: int
    footprints: Mapping[int, int]
    keys: tuple[KeyColumn, ...]
    shared: bool = False


@dataclass(frozen=True, eq=False)
class RankState:
    """The tiers that a rank opened before the first step.

    These are its part of the CPU tier (``slots`` slots of ``slot_bytes`` each, from ``first_slot``
    on) and its lower tiers. The first ``usable`` slots may be used at once (``None``: all of them);
    later reports announce the others. ``copy_paths`` are the paths of its copy engine.
    """

    rank: int
    namespace: Namespace
    first_slot: int
    slots: int
    slot_bytes: int
    tiers: tuple[RankTier, ...]
    usable: int | None = None
    copy_paths: tuple[CopyPathInfo, ...] = ()

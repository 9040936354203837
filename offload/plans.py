"""What the scheduler side tells the workers in a step, and what they answer.

Plain frozen values, cheap to pickle. A job has one id and ends exactly once on every rank. The
jobs of one plan are posted in this order: deletes, stores, demotes, loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGED = -1
"""Slot of a load item that only passes through a staging buffer of the worker."""
IN_SLAB = -1
"""Tier of a load item whose bytes are in its slot already, or are being read into it."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy chunks of one group from GPU blocks into slots: ``blocks[i]`` goes to ``slots[i]``."""

    job: int
    group: int
    blocks: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One chunk of a load. ``tier`` is where to read it first (``IN_SLAB``: no read);
    ``slot`` is where it lies or passes (``STAGED``: a buffer of the worker's own).
    Blocks below 0 are not wanted."""

    key: bytes
    group: int
    blocks: tuple[int, ...]
    slot: int
    tier: int


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Restore chunks for one request. Good only if every item is."""

    job: int
    request: str
    items: tuple[LoadItem, ...]


@dataclass(frozen=True, slots=True)
class DemoteJob:
    """Write chunks from slots to a lower tier, by key."""

    job: int
    tier: int
    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the workers have to do because of one scheduler step.

    ``fence`` names store jobs whose source blocks are given away in this step: they must have
    read them before the step's forward pass. ``reset`` orders a reset of everything first;
    ``epochs`` are then the new epochs of the lower tiers. ``idle``: no forward pass in this step.
    """

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    demotes: tuple[DemoteJob, ...] = ()
    deletes: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    touches: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    fence: tuple[int, ...] = ()
    reset: bool = False
    epochs: tuple[int, ...] = ()
    idle: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do for a worker."""
        return not (
            self.stores
            or self.loads
            or self.demotes
            or self.deletes
            or self.touches
            or self.fence
            or self.reset
        )


@dataclass(slots=True)
class JobResult:
    """How one job ended on the ranks that have answered so far.

    ``bad`` are the keys that failed. For a load ``lost`` is the part of ``bad`` that its tier
    does not hold intact any more (missing or corrupt): those keys are to be forgotten.
    """

    ranks: int = 1
    bad: frozenset[bytes] = frozenset()
    lost: frozenset[bytes] = frozenset()
    failed: bool = False

    def merge(self, other: JobResult) -> JobResult:
        """The sum of two ranks' answers."""
        return JobResult(
            self.ranks + other.ranks,
            self.bad | other.bad,
            self.lost | other.lost,
            self.failed or other.failed,
        )


@dataclass(slots=True)
class StepReport:
    """The jobs that ended since the last report, by job id."""

    results: dict[int, JobResult] = field(default_factory=dict)

    def merge(self, other: StepReport) -> StepReport:
        """The sum of two ranks' reports; used to aggregate over ranks."""
        merged = dict(self.results)
        for job, result in other.results.items():
            mine = merged.get(job)
            merged[job] = mine.merge(result) if mine else result
        return StepReport(merged)

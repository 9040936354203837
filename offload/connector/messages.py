"""What crosses between the scheduler side and the worker side through vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from offload.connector.adapters import AdapterName, Loaded, joined
from offload.namespace import Namespace
from offload.plans import StepPlan, StepReport
from tiers.base import KeyColumn


@dataclass
class OffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vllm is untyped here
    """One step's plan, from the scheduler to every worker, and what it takes the adapters for."""

    plan: StepPlan
    adapters: Mapping[AdapterName, bytes] = field(default_factory=dict)


@dataclass
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vllm is untyped here
    """What one rank (after aggregation: all ranks) finished, its counters, and the LoRA adapters
    that it has loaded."""

    report: StepReport
    counters: dict[str, float] = field(default_factory=dict)
    adapters: Loaded = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadWorkerMetadata:
        assert isinstance(other, OffloadWorkerMetadata)
        counters = dict(self.counters)
        for name, value in other.counters.items():
            counters[name] = counters.get(name, 0) + value
        adapters = joined(self.adapters, other.adapters)
        return OffloadWorkerMetadata(self.report.merge(other.report), counters, adapters)


@dataclass(frozen=True, eq=False)
class TierState:
    """One lower tier of one rank after it was opened. ``footprints`` are bytes by group id.

    ``keys`` are its records, least recently used first. They travel as columns, in one piece
    unless their lengths differ: a million single objects take most of a second to pickle. There are
    none of a ``shared`` tier: it is asked.
    """

    name: str
    capacity_bytes: int
    footprints: Mapping[int, int]
    keys: tuple[KeyColumn, ...]
    shared: bool = False


@dataclass
class OffloadHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is untyped here
    """What the scheduler must know of a rank before it can plan."""

    rank: int
    namespace: Namespace
    first_slot: int
    slots: int
    slot_bytes: int
    tiers: tuple[TierState, ...]

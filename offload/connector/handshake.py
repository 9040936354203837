"""The messages between the scheduler side and the worker side that travel through vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from offload.connector.model.adapters import AdapterName, Loaded, joined
from offload.messages.plan import StepPlan
from offload.messages.report import RankState, StepReport


@dataclass
class OffloadMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vllm is untyped here
    """One step's plan, from the scheduler to every worker, with the adapter contents that it
    assumes."""

    plan: StepPlan
    adapters: Mapping[AdapterName, bytes] = field(default_factory=dict)


@dataclass
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vllm is untyped here
    """The results of one rank (after aggregation: of all ranks), with its counters and the LoRA
    adapters that it has loaded."""

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


@dataclass
class OffloadHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is untyped here
    """The facts about a rank that the scheduler must know before it can plan."""

    state: RankState

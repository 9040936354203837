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
    """One step's plan, sent by the scheduler to every worker, with the adapter contents that the
    plan assumes."""

    plan: StepPlan
    adapters: Mapping[AdapterName, bytes] = field(default_factory=dict)
    question: int = 0
    """Number of the question about the weights (`offload.connector.scheduler.cache_resets`); 0 for
    none."""


@dataclass(frozen=True, slots=True)
class WeightsAnswer:
    """The answer of ``ranks`` ranks: how often each has slept since the previous answer, and
    whether all still have the same weights as at that time."""

    question: int
    ranks: int
    sleeps: int
    is_same: bool

    def merge(self, other: WeightsAnswer | None) -> WeightsAnswer:
        """Combine two answers. If the ranks disagree, the weights count as changed."""
        if other is None:
            return self
        is_same = self.is_same and other.is_same
        if (self.question, self.sleeps) != (other.question, other.sleeps):
            is_same = False
        ranks = self.ranks + other.ranks
        return WeightsAnswer(max(self.question, other.question), ranks, self.sleeps, is_same)


@dataclass
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vllm is untyped here
    """The results of one rank (after aggregation, of all ranks), with its counters and the LoRA
    adapters that it has loaded."""

    report: StepReport
    counters: dict[str, float] = field(default_factory=dict)
    adapters: Loaded = field(default_factory=dict)
    weights: WeightsAnswer | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadWorkerMetadata:
        assert isinstance(other, OffloadWorkerMetadata)
        counters = dict(self.counters)
        for name, value in other.counters.items():
            counters[name] = counters.get(name, 0) + value
        adapters = joined(self.adapters, other.adapters)
        weights = other.weights if self.weights is None else self.weights.merge(other.weights)
        return OffloadWorkerMetadata(self.report.merge(other.report), counters, adapters, weights)


@dataclass
class OffloadHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is untyped here
    """The facts about a rank that the scheduler needs before it can plan."""

    state: RankState

"""Counters of both sides, published through vLLM's own ``/metrics``.

Names follow Prometheus: ``vllm:kvtiers_<what>_<unit>``; a counter gets ``_total`` when it is shown.
Every metric is declared in ``METRICS``. Counters travel as differences, gauges as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from offload.connector.guard import Faults

if TYPE_CHECKING:
    from offload.connector.scheduler_side import SchedulerSide

PREFIX = "vllm:kvtiers_"
GAUGE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its help text, its own label if it has one, and whether it only grows."""

    text: str
    label: str = ""
    counter: bool = True


METRICS: dict[str, Metric] = {
    "loaded_tokens": Metric("Tokens restored, by the tier that gave them.", "tier"),
    "stored_chunks": Metric("Chunks that became readable in a tier.", "tier"),
    "store_failures": Metric("Chunks that could not be written to a tier.", "tier"),
    "evicted_chunks": Metric("Chunks evicted from a tier to make room.", "tier"),
    "dropped_chunks": Metric("Chunks forgotten because they were missing or damaged.", "tier"),
    "read_bytes": Metric("Bytes read from a lower tier.", "tier"),
    "read_seconds": Metric("Time spent in reads of a lower tier.", "tier"),
    "write_bytes": Metric("Bytes written to a lower tier.", "tier"),
    "write_seconds": Metric("Time spent in writes of a lower tier.", "tier"),
    "loads": Metric("Loads that ended well."),
    "load_failures": Metric("Loads that failed and were recomputed."),
    "load_timeouts": Metric("Loads that took longer than load_timeout_s."),
    "load_bytes": Metric("Bytes copied from the CPU tier into GPU blocks."),
    "load_seconds": Metric("Time from the start of a load to its end."),
    "store_bytes": Metric("Bytes copied from GPU blocks into the CPU tier."),
    "store_seconds": Metric("Time from the submission of a store to its end."),
    "load_refusals": Metric("Hits not used because the load budget was spent."),
    "short_loads": Metric("Hits cut because a slow tier would have given only a few tokens."),
    "store_refusals": Metric("Chunks that found no slot in the CPU tier."),
    "stores_cancelled": Metric("Stores given up because their blocks were reused first."),
    "fence_timeouts": Metric("Stores that were failed because a step could not wait for them."),
    "corrupt_records": Metric("Records of a lower tier that failed verification.", "tier"),
    "write_failures": Metric("Records that a lower tier did not take."),
    "tier_errors": Metric("Operations that failed for a lower tier as a whole."),
    "breaker_openings": Metric("Times that a lower tier was shut out for failures.", "tier"),
    "breaker_state": Metric(
        "0: asked as usual, 1: being tried again, 2: shut out.", "tier", counter=False
    ),
    "break_even": Metric("1 while loading from a tier pays, else 0.", "tier", counter=False),
    "wrong_values": Metric("Values of clients in kv_transfer_params that were not understood."),
    "late_answers": Metric("Answers to jobs that had ended already."),
    "resets": Metric("Resets of all tiers."),
    "hook_faults": Metric("Exceptions contained in a vLLM hook.", "hook"),
    "resident_chunks": Metric("Chunks that a tier can give.", "tier", counter=False),
    "used_ratio": Metric("Used share of a tier's capacity.", "tier", counter=False),
}

# Worker counters by tier number that become metrics with the tier's name.
_BY_TIER = ("corrupt_records", "read_bytes", "read_seconds", "write_bytes", "write_seconds")


class OffloadStats(KVConnectorStats):  # type: ignore[misc]  # vllm is untyped here
    """Flat numbers by ``metric`` or ``metric:label``."""

    def reset(self) -> None:
        self.data = dict[str, float]()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        merged = dict(self.data)
        for name, value in other.data.items():
            counter = METRICS[name.partition(":")[0]].counter
            merged[name] = merged.get(name, 0) + value if counter else value
        return OffloadStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs every few seconds."""
        return {name: round(value, 3) for name, value in sorted(self.data.items())}


class StatsCollector:
    """Collects differences since the last call; lives on the scheduler's thread."""

    def __init__(self, scheduler: SchedulerSide, faults: Faults) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._sent: dict[str, float] = {}
        self._worker: dict[str, float] = {}
        self._gauges_at = 0.0

    def add_worker_counters(self, counters: Mapping[str, float]) -> None:
        """Counters that workers reported, summed over ranks."""
        for name, value in counters.items():
            metric, _, tier = name.partition(":")
            if metric in _BY_TIER and self._scheduler.planner is not None:
                name = f"{metric}:{self._scheduler.planner.lower[int(tier)].name}"
            self._worker[name] = self._worker.get(name, 0) + value

    def collect(self) -> OffloadStats | None:
        """What changed; ``None`` if nothing did."""
        data: dict[str, float] = self._worker
        self._worker = {}
        now = self._totals()
        for name, value in now.items():
            difference = value - self._sent.get(name, 0)
            if difference:
                data[name] = difference
        self._sent = now
        if data or time.monotonic() - self._gauges_at > GAUGE_PERIOD_S:
            self._gauges_at = time.monotonic()
            data |= self._gauges()
        return OffloadStats(data=data) if data else None

    def _totals(self) -> dict[str, float]:
        totals: dict[str, float] = {f"hook_faults:{k}": v for k, v in self._faults.by_hook.items()}
        totals["wrong_values"] = self._scheduler.intake.wrong_values
        if self._scheduler.planner is not None:
            totals |= self._scheduler.planner.totals()
        return totals

    def _gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        for name, (chunks, used, capacity) in self._scheduler.tier_usage().items():
            gauges[f"resident_chunks:{name}"] = chunks
            gauges[f"used_ratio:{name}"] = used / capacity if capacity else 0.0
        for gate in self._scheduler.planner.gates.tiers if self._scheduler.planner else ():
            worst = max(gate.reads.state.value, gate.writes.state.value)
            gauges[f"breaker_state:{gate.name}"] = worst
            gauges[f"break_even:{gate.name}"] = int(gate.pace.pays)
        return gauges


class OffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vllm is untyped here
    """Registers ``METRICS`` with vLLM's Prometheus registry and feeds them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}
        for name, metric in METRICS.items():
            kind = metric_types[Counter if metric.counter else Gauge]
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            self._metrics[name] = kind(
                name=PREFIX + name, documentation=metric.text, labelnames=labels
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one batch of numbers."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric, _, label = name.partition(":")
            found = self._metrics[metric].labels(*values, *([label] if label else []))
            if METRICS[metric].counter:
                found.inc(value)
            else:
                found.set(value)

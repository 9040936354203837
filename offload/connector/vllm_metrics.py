"""Numbers of both sides, published through vLLM's own ``/metrics``.

Every metric is declared in ``offload.metric_table``. Counters travel as differences, gauges as they
are, each under a flat name: ``metric`` or ``metric:label``, with labels in their declared order.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from offload.metric_table import METRICS, PREFIX


class OffloadStats(KVConnectorStats):  # type: ignore[misc]  # vllm is untyped here
    """Flat numbers, see the module."""

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
            self._metrics[name] = kind(
                name=PREFIX + name,
                documentation=metric.text,
                labelnames=[*labelnames, *metric.labels],
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one batch of numbers."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric, *labels = name.split(":")
            found = self._metrics[metric].labels(*values, *labels)
            if METRICS[metric].counter:
                found.inc(value)
            else:
                found.set(value)

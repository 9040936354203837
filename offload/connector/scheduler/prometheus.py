"""Publishes the numbers of both sides through vLLM's ``/metrics``.

Every metric is declared in ``offload.telemetry.metrics``. Counters travel as differences, gauges as
absolute values, each under a flat name: ``metric`` or ``metric:label``, with labels in their
declared order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from offload.config.schema import draft_config, tier_names
from offload.connector.guard import HOOKS
from offload.requests.miss_reasons import Reason
from offload.telemetry.counters import LEFT_FOR
from offload.telemetry.metrics import METRICS, PREFIX, Metric, Tiers

logger = logging.getLogger(__name__)


class OffloadStats(KVConnectorStats):  # type: ignore[misc]  # vllm is untyped here
    """Numbers by flat name; see the module's docstring."""

    def reset(self) -> None:
        self.data = dict[str, float]()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        merged = dict(self.data)
        for name, value in other.data.items():
            metric = METRICS.get(name.partition(":")[0])
            is_gauge = metric is not None and not metric.counter
            merged[name] = value if is_gauge else merged.get(name, 0) + value
        return OffloadStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """The numbers that vLLM logs every few seconds."""
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
        self._has_failed = False
        known = _label_values(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for name, metric in METRICS.items():
            about: dict[str, Any] = {
                "name": PREFIX + name,
                "documentation": metric.text,
                "labelnames": [*labelnames, *metric.labels],
            }
            if metric.counter:
                self._metrics[name] = metric_types[Counter](**about)
            else:
                # With several API servers, any of them receives a step's numbers. By default each
                # API server would show the value that it received last, and a sum over them would
                # be wrong.
                self._metrics[name] = metric_types[Gauge](**about, multiprocess_mode="mostrecent")
            for values in per_engine_labelvalues.values():
                for labels in started(name, metric, known):
                    self._metrics[name].labels(*values, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one batch of numbers.

        Never raises: if this raised, vLLM would end the engine, and every request would fail
        because of a number.
        """
        for name, value in transfer_stats_data.items():
            try:
                self._observe(name, value, self.per_engine_labelvalues[engine_idx])
            except Exception as error:  # see the docstring above
                if not self._has_failed:
                    self._has_failed = True
                    logger.error("kvtiers: metric %s cannot be published: %r", name, error)

    def _observe(self, name: str, value: float, engine: Sequence[object]) -> None:
        metric, *labels = name.split(":")
        found = self._metrics[metric].labels(*engine, *labels)
        if METRICS[metric].counter:
            found.inc(value)
        else:
            found.set(value)


def started(
    name: str, metric: Metric, known: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """The labels under which a counter is published from the start, with the value 0.

    For Prometheus, a series that begins with 1 has not grown: ``increase`` would be 0 after the
    first fault. Gauges are left out, and so are hooks that are never called and queries that no
    tier receives.
    """
    if not metric.counter or metric.tiers is Tiers.SHARED or name in ("hook_calls", "hook_seconds"):
        return
    tiers = known["tier"][1:] if metric.tiers is Tiers.LOWER else known["tier"]
    left = [cause.value for cause in LEFT_FOR]
    reasons = left if name == "removed_chunks" else known["reason"]
    values = {**known, "tier": tiers, "reason": reasons}
    yield from product(*(values[label] for label in metric.labels))


def _label_values(extra: Any) -> dict[str, Sequence[str]]:
    """The possible values of each label with this configuration.

    A faulty configuration is refused elsewhere; this function reads as much of it as it can.
    """
    reasons = [reason.value for reason in Reason if reason is not Reason.COMPLETE]
    tiers = ["cpu", *tier_names(draft_config(extra)[0])]
    return {"tier": tiers, "reason": reasons, "hook": sorted(HOOKS)}

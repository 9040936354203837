"""Collects the numbers of both sides for ``/metrics``, on the scheduler's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offload.connector.guard import Faults
from offload.connector.scheduler.prometheus import OffloadStats
from offload.messages.report import RankState

if TYPE_CHECKING:
    from offload.connector.scheduler.scheduler_side import SchedulerSide
    from offload.planner.planner import Planner

GAUGE_PERIOD_S = 1.0
_BY_TIER = (
    *("corrupt_records", "set_aside", "refused_records"),
    *("scrubbed_records", "scrubbed_bytes", "scrub_damaged"),
    *("read_bytes", "read_seconds", "write_bytes", "write_seconds"),
)
"""Worker counters, by tier number, that become metrics labelled with the tier's name."""


class MetricsCollector:
    """Computes differences of counters since the previous call.

    Gauges, and counters that change at every step, are added about once a second.
    """

    def __init__(self, side: SchedulerSide, ranks: Sequence[RankState], faults: Faults) -> None:
        self._side = side
        self._faults = faults
        self._sent: dict[str, float] = {}
        self._worker_counters: dict[str, float] = {}
        self._set_aside_at: dict[str, float] = {}
        self._unit_bytes = unit_bytes(ranks)
        self._copy_gauges = copy_gauges(ranks)
        self._gauges_at = 0.0
        self._log_changes = 0

    def add_worker_counters(self, counters: Mapping[str, float]) -> None:
        """Add counters that workers reported, summed over ranks."""
        for name, value in counters.items():
            metric, _, tier = name.partition(":")
            if metric in _BY_TIER:
                tier = self._side.planner.lower[int(tier)].name
                name = f"{metric}:{tier}"
            if metric == "set_aside":
                self._set_aside_at[f"set_aside_timestamp_seconds:{tier}"] = time.time()
            self._worker_counters[name] = self._worker_counters.get(name, 0) + value

    def collect(self, others: Mapping[str, float]) -> OffloadStats | None:
        """Return the numbers that changed, including the ``others``; ``None`` if none did."""
        data: dict[str, float] = self._worker_counters
        self._worker_counters = {}
        self._add_differences(data, self._totals() | dict(others))
        if data or time.monotonic() - self._gauges_at > GAUGE_PERIOD_S:
            if time.monotonic() - self._gauges_at > GAUGE_PERIOD_S:
                self._gauges_at = time.monotonic()
                self._add_differences(data, self._counters_of_steps())
                data |= self._faults.take_slowest()
            data |= self._gauges()
        return OffloadStats(data=data) if data else None

    def _add_differences(self, data: dict[str, float], now: Mapping[str, float]) -> None:
        for name, value in now.items():
            difference = value - self._sent.get(name, 0)
            if difference:
                data[name] = data.get(name, 0) + difference
        self._sent |= now

    def _totals(self) -> dict[str, float]:
        side = self._side
        totals: dict[str, float] = {f"hook_faults:{k}": v for k, v in self._faults.by_hook.items()}
        totals["wrong_values"] = side.requests.wrong_values
        totals |= side.planner.totals()
        if side.log.changes != self._log_changes:  # gauges rarely change
            self._log_changes = side.log.changes
            totals |= side.log.totals()
        return totals

    def _counters_of_steps(self) -> dict[str, float]:
        """Counters that grow at every step; they are published about once a second."""
        lookups = self._side.lookups
        counts = {"lookups": lookups.count, "lookup_seconds": lookups.seconds}
        return self._faults.times() | counts

    def _gauges(self) -> dict[str, float]:
        planner = self._side.planner
        gauges: dict[str, float] = {"loading_chunks": planner.loads.loading}
        gauges |= self._set_aside_at
        gauges |= self._copy_gauges
        pinned = self._side.client_pinned()
        depths = (planner.stores.storing, *(queue.depth for queue in planner.write_through.queues))
        for index, storing in zip((planner.cpu, *planner.lower), depths, strict=True):
            name, space = index.name, index.space
            unit = self._unit_bytes.get(name, 0)
            gauges |= {
                f"resident_chunks:{name}": len(index),
                f"used_ratio:{name}": space.used / space.capacity if space.capacity else 0.0,
                f"kept_ratio:{name}": pinned.get(name, 0) / max(1, space.capacity),
                f"queue_depth:{name}": storing,
            }
            if unit:
                gauges[f"capacity_bytes:{name}"] = space.capacity * unit
                gauges[f"used_bytes:{name}"] = space.used * unit
        return gauges | _health_gauges(planner)


def _health_gauges(planner: Planner) -> dict[str, float]:
    gauges: dict[str, float] = {}
    prefill = planner.health.prefill_rate
    if prefill is not None:
        gauges["prefill_tokens_per_second"] = prefill
    for tier in planner.health.tiers:
        gauges[f"breaker_state:{tier.name}"] = tier.breaker_state.value
        gauges[f"break_even:{tier.name}"] = int(tier.break_even.pays)
        if (rate := tier.break_even.rate.value()) is not None:
            gauges[f"load_tokens_per_second:{tier.name}"] = rate
    return gauges


def unit_bytes(ranks: Sequence[RankState]) -> dict[str, int]:
    """The number of bytes, summed over all ranks, that one unit of each tier's space stands for.
    The unit is a slot, or a byte on one rank."""
    lower = {tier.name: len(ranks) for tier in ranks[0].tiers}
    return {"cpu": sum(rank.slot_bytes for rank in ranks)} | lower


def copy_gauges(ranks: Sequence[RankState]) -> dict[str, float]:
    """Gauges of the ranks' ways of copying: the number of groups copied in each way, and the
    slowest measured rate of each path."""
    gauges: dict[str, float] = {}
    for path in ranks[0].copy_paths:
        if path.is_used:
            name = f"copy_groups:{path.direction}:{path.name}"
            gauges[name] = gauges.get(name, 0) + 1
    for path in (path for rank in ranks for path in rank.copy_paths):
        if path.bytes_per_second is not None:
            name = f"copy_bytes_per_second:{path.direction}:{path.name}"
            gauges[name] = min(gauges.get(name, math.inf), path.bytes_per_second)
    return gauges

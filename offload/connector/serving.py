"""Composes the parts of the scheduler's process, once all workers are ready.

`offload.connector.connector` passes vLLM's hooks on to these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config.schema import tier_names
from offload.connector.guard import Faults
from offload.connector.model.adapters import AdapterBook
from offload.connector.scheduler.cache_resets import CacheResets
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.kv_events import KvEvents
from offload.connector.scheduler.live_requests import LiveRequests
from offload.connector.scheduler.metrics_collector import MetricsCollector
from offload.connector.scheduler.pending_epochs import PendingEpochs
from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.connector.startup import ServerSetup, agreed_namespace
from offload.messages.report import RankState
from offload.planner.build import make_planner
from offload.planner.work_limits import WorkLimits


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of the scheduler's process. ``events`` is ``None`` if vLLM publishes no KV
    events."""

    side: SchedulerSide
    resets: CacheResets
    metrics: MetricsCollector
    events: KvEvents | None


def begin_serving(
    setup: ServerSetup, ranks: Sequence[RankState], gpu_cache: GpuCache, faults: Faults
) -> Serving:
    """Compose the scheduler's process for these ranks, whose namespace ``setup`` adopts.

    Raises ``NamespaceError`` if two processes disagree on the namespace, and
    ``TierUnavailableError`` if two ranks have not opened the same tiers.
    """
    setup.adopt(agreed_namespace(setup.namespace, ranks))
    config, layout = setup.config, setup.layout
    limits = WorkLimits.of_server(config, ranks, setup.kv_cache_config.num_blocks)
    planner = make_planner(config, layout.groups, ranks, limits)
    events = KvEvents(layout, planner) if setup.publishes_events else None
    requests = LiveRequests(
        layout,
        AdapterBook(len(ranks)),
        require_salt=config.require_salt,
        recorder=setup.recorder(),
        tiers=tier_names(config),
    )
    side = SchedulerSide(
        layout,
        planner,
        requests,
        faults,
        log=setup.request_log(),
        gpu_cache=gpu_cache,
        namespace_differences=setup.namespace_differences(planner.lower),
        max_pinned_share=config.max_pinned_share,
        verify=config.verify == "device",
        by_priority=setup.runs_by_priority,
        wrong_kv=setup.wrong_kv_causes,
    )
    on_disk = setup.tier_epochs()
    epochs = PendingEpochs(len(config.lower), on_disk.begin, take_back_one=on_disk.take_back)
    resets = CacheResets(side, epochs, len(ranks), can_sleep=setup.can_sleep)
    return Serving(side, resets, MetricsCollector(side, ranks, faults), events)

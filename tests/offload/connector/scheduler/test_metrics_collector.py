"""The numbers on ``/metrics`` equal the counters, and every number appears on the page."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from offload.connector.scheduler.metrics_collector import MetricsCollector
from offload.connector.scheduler.prometheus import OffloadPromMetrics, OffloadStats
from offload.requests.request_log import RequestLog
from offload.telemetry.metrics import METRICS
from offload.worker.tier_folders import TierFolders
from tests.dashboards import alert_rules
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_scheduler import live
from tests.promql import parse

Page = dict[str, float]


class Scraped:
    """A metrics page, fed with what vLLM takes from the connector."""

    def __init__(self, world: OracleEngine) -> None:
        self._registry = CollectorRegistry()
        kinds: dict[Any, Any] = {
            kind: partial(kind, registry=self._registry) for kind in (Counter, Gauge, Histogram)
        }
        labels: dict[int, list[object]] = {0: ["tiny", "0"]}
        self.metrics = OffloadPromMetrics(world._config, kinds, ["model_name", "engine"], labels)
        connector: Any = world.connector
        take = connector.get_kv_connector_stats

        def observing() -> Any:
            stats = take()
            if stats is not None:
                self.metrics.observe(stats.data)
            return stats

        connector.get_kv_connector_stats = observing
        self.take = observing

    def page(self) -> Page:
        found: Page = {}
        for family in text_string_to_metric_families(generate_latest(self._registry).decode()):
            for sample in family.samples:
                metric = sample.name.removeprefix("vllm:kvtiers_").removesuffix("_total")
                if metric in METRICS:
                    labels = [sample.labels[label] for label in METRICS[metric].labels]
                    found[":".join([metric, *labels])] = sample.value
        return found


def differences(folder: Path) -> dict[str, tuple[float, float]]:
    """The values on the page and the counters, if they differ."""
    with OracleEngine(MODELS["full"], Conditions(slots=20, fault_rate=0.1), folder, 3) as world:
        scraped = Scraped(world)
        live(world, 150)
        collector: Any = world.connector.serving.metrics
        # numbers that are published only from time to time become due
        collector._gauges_at = time.monotonic() - 10.0
        scraped.take()
        page = scraped.page()
        scheduler: Any = world.connector.serving.side
        counted = scheduler.planner.totals() | scheduler.log.totals()
        counted |= {"lookups": scheduler.lookups.count}
        counted |= {
            f"resident_chunks:{i.name}": len(i) for i in (world.planner.cpu, *world.planner.lower)
        }
        assert counted["load_failures"] > 0, "the simulation has too few events"
        assert page["hook_calls:build_plan"] > 100
        assert page["hook_seconds:build_plan"] > 0
        assert page["used_bytes:cpu"] == world.planner.cpu.space.used * 4096
        return {
            name: (page.get(name, 0.0), value)
            for name, value in counted.items()
            if page.get(name, 0.0) != pytest.approx(value)
        }


def test_counters_on_the_page_add_up(tmp_path: Path) -> None:
    assert differences(tmp_path) == {}


def test_counters_that_are_still_zero_are_on_the_page(tmp_path: Path) -> None:
    """``increase`` of a series that begins with 1 is 0, so an alert would miss the first fault, and
    so would a quotient of rates with a missing series."""
    with OracleEngine(MODELS["full"], Conditions(slots=20, fault_rate=0.1), tmp_path, 3) as world:
        scraped = Scraped(world)
        first = scraped.page()
        live(world, 150)
        later = scraped.page()
    assert set(first.values()) == {0.0}
    late = {n for n in later.keys() - first.keys() if METRICS[n.partition(":")[0]].counter}
    assert {name.partition(":")[0] for name in late} <= {"hook_calls", "hook_seconds"}
    hooks = {name.partition(":")[2] for name in late}
    assert {"build_plan", "update_connector_output", "on_new_request"} <= hooks
    assert {f"hook_faults:{hook}" for hook in hooks} <= first.keys()
    for rule in alert_rules():
        for metric in parse(rule["expr"]).metrics:
            name = metric.removeprefix("vllm:kvtiers_").removesuffix("_total")
            there = [series for series in first if series.partition(":")[0] == name]
            assert there or not METRICS[name].counter or name == "hook_calls", rule["alert"]


def test_a_tier_that_begins_empty_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is published as well, because a counter that is 1 from the start has not grown."""
    before = time.time()
    specs = TierFolders.specs
    for count in (0, 1):
        monkeypatch.setattr(
            TierFolders,
            "specs",
            lambda self, n=count: [replace(s, set_aside=n) for s in specs(self)],
        )
        with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path / str(count), 3) as world:
            scraped = Scraped(world)
            live(world, 30)
            world.executor._add_loss(0)  # and once while the server runs
            live(world, 30)
            scraped.take()
            page = scraped.page()
        assert page["set_aside:file"] == 1 + count
        assert page["set_aside_timestamp_seconds:file"] >= before


def test_a_gauge_is_one_number_however_many_api_servers_there_are(tmp_path: Path) -> None:
    """Several API servers share a page; the default of prometheus_client is one series per
    process."""
    modes: list[Any] = []

    def gauge(**about: Any) -> Gauge:
        modes.append(about["multiprocess_mode"])
        return Gauge(**about, registry=CollectorRegistry())

    registry = CollectorRegistry()
    counter = partial(Counter, registry=registry)
    kinds: dict[Any, Any] = {Counter: counter, Gauge: gauge, Histogram: None}
    with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path, 3) as world:
        OffloadPromMetrics(world._config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    assert modes
    assert set(modes) == {"mostrecent"}


def test_a_number_that_cannot_be_published_does_not_affect_others(tmp_path: Path) -> None:
    """An exception would end vLLM's engine for all requests."""
    with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path, 3) as world:
        scraped = Scraped(world)
    wrong = {"no_such": 1.0, "loads": -1.0, "misses": 2.0, "used_ratio:cpu:x": 0.5}
    scraped.metrics.observe({**wrong, "resets": 3.0})
    scraped.metrics.observe({"resets": 1.0}, engine_idx=7)
    page = scraped.page()
    assert page["resets"] == 3.0
    assert page["loads"] == 0.0


def test_what_ranks_report_between_two_scrapes_adds_up(tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path, 3) as world:
        scraped = Scraped(world)
        scraped.take()
        collector: Any = world.connector.serving.metrics
        before = scraped.page()
        collector.add_worker_counters({"store_bytes": 5.0, "read_bytes:0": 1.0})
        collector.add_worker_counters({"store_bytes": 7.0, "read_bytes:0": 2.0})
        scraped.take()
        after = scraped.page()
    name = world.planner.lower[0].name
    grown = {n: after[n] - before[n] for n in ("store_bytes", f"read_bytes:{name}")}
    assert grown == {"store_bytes": 12.0, f"read_bytes:{name}": 3.0}


def test_stats_of_several_steps_add_up() -> None:
    """vLLM combines stats that it has no time to publish: counters are summed, and for gauges the
    last value counts."""
    first = OffloadStats(data={"loads": 2, "used_ratio:cpu": 0.5})
    second = OffloadStats(data={"loads": 3, "used_ratio:cpu": 0.7, "misses:evicted": 1})
    assert first.aggregate(second).data == {"loads": 5, "used_ratio:cpu": 0.7, "misses:evicted": 1}


def test_these_worlds_are_the_same_on_a_slow_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take longer may do more work. If the real time counted, a slow machine might see
    none of the events on which these tests depend."""

    def events(name: str) -> dict[str, float]:
        conditions = Conditions(slots=20, fault_rate=0.1)
        with OracleEngine(MODELS["full"], conditions, tmp_path / name, 3) as world:
            live(world, 150)
            return world.events()

    fast = events("fast")
    real, reads = time.monotonic, itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: real() + 0.03 * next(reads))
    assert events("slow") == fast


def _sent_again(patch: pytest.MonkeyPatch) -> None:
    collect = MetricsCollector.collect

    def forgetful(self: Any, others: Any) -> Any:
        found = collect(self, others)
        self._sent.pop("loads", None)
        return found

    patch.setattr(MetricsCollector, "collect", forgetful)


def _changes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    count = RequestLog._count

    def quietly(self: Any, record: Any, tokens: int) -> None:
        count(self, record, tokens)
        self.changes = 1

    patch.setattr(RequestLog, "_count", quietly)


@pytest.mark.parametrize("fault", [_sent_again, _changes_unnoticed])
def test_planted_faults_are_detected(fault: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert differences(tmp_path) != {}

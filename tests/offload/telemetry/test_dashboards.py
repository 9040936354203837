"""Compares the dashboard and the alert rules with the table of metrics.
``tests/vllm/test_server.py`` compares them with the page of a running server."""

from __future__ import annotations

import operator
import re

import pytest

from offload.planner.circuit_breaker import BreakerState, CircuitBreaker
from offload.requests.miss_reasons import Reason
from offload.telemetry.metrics import METRICS
from tests.dashboards import alert_rules, dashboard, queries
from tests.promql import PromqlError, parse, problems

VLLMS = {
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:time_to_first_token_seconds_bucket": {"le"},
}
"""vLLM's own metrics that are used, with their labels; a test checks a running server for these."""
PROMETHEUS = {"instance", "job"}


def table() -> dict[str, set[str]]:
    ours = {metric.shown_as(name): set(metric.labels) for name, metric in METRICS.items()}
    return {name: labels | {"engine", "model_name"} for name, labels in (ours | VLLMS).items()}


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_every_metric_and_label_exists(where: str, query: str) -> None:
    assert problems(query, table(), PROMETHEUS) == [], where


def test_every_metric_is_used_or_left_out_on_purpose() -> None:
    used = {name for _, query in queries() for name in parse(query).metrics}
    ours = {metric.shown_as(name) for name, metric in METRICS.items()}
    left_out = {
        "copy_bytes_per_second": "measured once, at the start",
        "copy_groups": "chosen once, at the start",
        "read_waits_total": "requests do not wait for reads by default",
        "read_wait_seconds_total": "requests do not wait for reads by default",
        "copy_failures_total": "the stores and loads that fail are shown",
        "breaker_openings_total": "breaker_state has the result",
        "dropped_chunks_total": "removed_chunks has the reasons",
        "evicted_chunks_total": "removed_chunks has the reasons",
        "events_lost_total": "for listeners of KV events",
        "late_answers_total": "only needed to examine a fault",
        "hit_tokens_total": "what was planned; what came is in loaded_tokens",
        "missed_tokens_total": "loaded and wanted tokens",
        "refused_records_total": "only needed to examine a start",
        "requests_lost_total": "only needed by servers that record requests",
        "resets_total": "done on request",
        "unverified_chunks_total": "only needed to examine a fault",
        "verified_chunks_total": "only needed to examine a fault",
        "scrub_damaged_total": "corrupt_records has them",
        "scrubbed_bytes_total": "only needed to examine a disk",
        "scrubbed_records_total": "only needed to examine a disk",
        "set_aside_total": "an alert goes by the time of the last one",
    }
    assert ours - used == {f"vllm:kvtiers_{name}" for name in left_out}


def test_tokens_from_a_tier_are_loaded_tokens() -> None:
    """Hits are counted when their load is planned: over a dead disk there are many."""
    [panel] = [p for p in dashboard()["panels"] if p["title"].startswith("Share of wanted tokens")]
    [target] = panel["targets"]
    assert set(parse(target["expr"]).metrics) == {
        "vllm:kvtiers_loaded_tokens_total",
        "vllm:kvtiers_wanted_tokens_total",
    }


def test_the_reasons_in_queries_exist() -> None:
    values = [value for _, query in queries() for value in parse(query).values]
    reasons = {value for _, label, value in values if label == "reason"}
    assert reasons
    assert reasons <= {reason.value for reason in Reason}


def test_panels_do_not_overlap_and_legends_use_labels_of_the_query() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & places, panel["title"]
        places |= cells
        for target in panel.get("targets", ()):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= parse(target["expr"]).grouped, panel["title"]


def test_every_panel_shows_only_the_chosen_servers() -> None:
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert names == {"datasource", "model", "instance"}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for metric, labels in parse(target["expr"]).metrics.items():
                assert {"model_name", "instance"} <= labels, f"{panel['title']}: {metric}"
            chosen = target["expr"].count('model_name=~"$model", instance=~"$instance"')
            assert chosen == target["expr"].count("{"), panel["title"]


def firing(value: float, expression: str) -> bool:
    """The result of the comparison at the end of an alert's first line, for one value of a
    gauge."""
    comparison, number = expression.split(")")[-1].split()
    return {"==": operator.eq, ">": operator.gt}[comparison](value, float(number))


def test_a_tier_whose_disk_hangs_keeps_its_alert() -> None:
    """A probe that hangs for 5 s shows another state meanwhile. If the rule looked at single
    values, this would restart the alert's five minutes."""
    [rule] = [rule for rule in alert_rules() if rule["alert"] == "KvtiersTierShutOut"]
    breaker = CircuitBreaker()
    breaker.observe(0, 3, 0.0)
    states, asked_at = set(), None
    for second in range(900):
        breaker.tick(second)
        if breaker.state is BreakerState.HALF_OPEN:
            asked_at = second if asked_at is None else asked_at
            if second - asked_at >= 5:
                asked_at = None
                breaker.judge(second, good=False)
        states.add(breaker.state)
        assert firing(breaker.state.value, rule["expr"]), second
    assert states == {BreakerState.OPEN, BreakerState.HALF_OPEN}
    assert not firing(BreakerState.CLOSED.value, rule["expr"])


def test_an_alert_on_a_gauge_needs_an_active_server() -> None:
    """vLLM publishes nothing while it is idle, and the page keeps the last value."""
    [rule] = [rule for rule in alert_rules() if "hook_slowest" in rule["expr"]]
    assert "vllm:kvtiers_hook_calls_total" in parse(rule["expr"].split(" and ")[1]).metrics


def test_alerts_contain_a_remedy() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(set(names)) == len(names)
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("ticket", "info")
        assert len(rule["annotations"]["description"]) > 40
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= parse(rule["expr"]).grouped, rule["alert"]


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ("sum(rate(vllm:kvtiers_no_such_total[5m]))", "no metric vllm:kvtiers_no_such_total"),
        ("sum by (tire) (vllm:kvtiers_used_ratio)", "no label tire"),
        ('vllm:kvtiers_loads_total{tier="cpu"}', "no label tier"),
        ("sum(rate(vllm:kvtiers_loads_total))", "without a range"),
        ("sum(vllm:kvtiers_loads_total[5m])", "with a range"),
        ("sum(rate(vllm:kvtiers_loads_total[5 m]))", "cannot be read"),
        ("sum(rate(vllm:kvtiers_loads_total[5m])", "is not closed"),
        ("rat(vllm:kvtiers_loads_total[5m])", "unknown function rat"),
        ("rate(vllm:kvtiers_loads_total[5m]) / ", "ends with /"),
        ("vllm:kvtiers_used_ratio{tier}", "no matcher"),
        ("sum by tier (vllm:kvtiers_used_ratio)", "list of labels"),
        ("1 + 1", "names no metric"),
        ("vllm:kvtiers_used_ratio > 0.9 and", "stands between"),
    ],
)
def test_wrong_queries_are_detected(query: str, part: str) -> None:
    found = problems(query, table(), PROMETHEUS)
    assert len(found) == 1, found
    assert part in found[0]


def test_a_valid_query_has_no_problems() -> None:
    found = parse('max by (tier) (vllm:kvtiers_used_ratio{engine="0", model_name=~"$m"}) > 0.9')
    assert found.metrics == {"vllm:kvtiers_used_ratio": {"engine", "model_name"}}
    assert found.grouped == {"tier"}
    with pytest.raises(PromqlError):
        parse("max by (tier (vllm:kvtiers_used_ratio)")

"""Checks the alert rules and the dashboard's queries with Prometheus itself.

Needs ``promtool`` (Debian: ``apt-get install prometheus``) and is skipped without it; the other
tests of both use a small parser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.dashboards import FOLDER, alert_rules, dashboard, queries

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="needs promtool: apt-get install prometheus"
)

RULES = FOLDER / "alerts.yaml"
HOURS = 3
MINUTES = HOURS * 60


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(PROMTOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prometheus_accepts_the_alert_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stderr
    assert f"{len(alert_rules())} rules found" in done.stdout


def as_rules(named: list[tuple[str, str]]) -> str:
    """Queries as recording rules, with the values that Grafana inserts for its variables."""
    rules = [
        {"record": f"query:{number}", "expr": re.sub(r"\$\{?\w+\}?", ".*", text)}
        for number, (_where, query) in enumerate(named)
        for text in [query.replace("$__rate_interval", "1m")]
    ]
    return yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})


def test_prometheus_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    found = [one for one in queries() if one[0].startswith("panel")]
    variables = [v["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    texts = [v if isinstance(v, str) else v["query"] for v in variables]
    for text in texts:  # Grafana's own function around a selector
        inside = re.fullmatch(r"label_values\((.*), *\w+\)", text)
        assert inside, text
        found.append((text, inside[1]))
    path = tmp_path / "rules.yaml"
    path.write_text(as_rules(found))
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stderr
    path.write_text(as_rules([*found, ("wrong", "sum by (tier) rate(x[1m])")]))
    assert promtool("check", "rules", path).returncode != 0, "promtool must refuse a wrong query"


def flat(value: float) -> str:
    """A gauge, minute by minute."""
    return f"{value}x{MINUTES}"


def growing(per_minute: float) -> str:
    """A counter that begins at zero."""
    return f"0+{per_minute}x{MINUTES}"


def once(count: int) -> str:
    """A counter that rises by this much in the last minutes before the end, and at no other
    time."""
    return f"0x{MINUTES - 3} {count}x2"


KVTIERS = "vllm:kvtiers_"
SICK: dict[str, dict[str, str]] = {
    "KvtiersTierShutOut": {'breaker_state{tier="lmdb"}': flat(2)},
    "KvtiersCorruptRecords": {'corrupt_records_total{tier="lmdb"}': once(5)},
    "KvtiersChunksDiffer": {"differing_chunks_total": once(1)},
    "KvtiersTierBeganEmpty": {'set_aside_timestamp_seconds{tier="lmdb"}': flat(HOURS * 3600 - 600)},
    "KvtiersLoadsFail": {"load_failures_total": growing(6), "loads_total": growing(60)},
    "KvtiersLoadsLate": {"load_timeouts_total": growing(1)},
    "KvtiersLoadingDoesNotPay": {'break_even{tier="lmdb"}': flat(0)},
    "KvtiersTierTooSmall": {
        'recomputed_tokens_total{reason="evicted"}': growing(300),
        "wanted_tokens_total": growing(1000),
    },
    "KvtiersNoRoom": {"store_refusals_total": growing(720)},
    "KvtiersWritesSkipped": {'writes_skipped_total{tier="lmdb"}': growing(720)},
    "KvtiersHookFault": {'hook_faults_total{hook="drain"}': once(1)},
    "KvtiersSlowHooks": {
        'hook_slowest_seconds{hook="drain"}': flat(0.2),
        'hook_calls_total{hook="drain"}': growing(60),
    },
}
WELL: dict[str, dict[str, str]] = {
    "KvtiersTierShutOut": {'breaker_state{tier="lmdb"}': flat(0)},
    "KvtiersCorruptRecords": {'corrupt_records_total{tier="lmdb"}': once(2)},
    "KvtiersChunksDiffer": {"differing_chunks_total": flat(3)},
    "KvtiersTierBeganEmpty": {'set_aside_timestamp_seconds{tier="lmdb"}': flat(-86_400)},
    "KvtiersLoadsFail": {"load_failures_total": growing(1), "loads_total": growing(60)},
    "KvtiersLoadsLate": {"load_timeouts_total": once(2)},
    "KvtiersLoadingDoesNotPay": {'break_even{tier="lmdb"}': flat(1)},
    "KvtiersTierTooSmall": {
        'recomputed_tokens_total{reason="evicted"}': growing(100),
        "wanted_tokens_total": growing(1000),
    },
    "KvtiersNoRoom": {"store_refusals_total": growing(60)},
    "KvtiersWritesSkipped": {'writes_skipped_total{tier="lmdb"}': growing(60)},
    "KvtiersHookFault": {'hook_faults_total{hook="drain"}': flat(3)},
    "KvtiersSlowHooks": {  # the last value of an idle server
        'hook_slowest_seconds{hook="drain"}': flat(0.2),
        'hook_calls_total{hook="drain"}': flat(60),
    },
}


def case(alert: str, metrics: dict[str, str], *, fires: bool) -> dict[str, object]:
    """One of promtool's tests: a server with these metrics, and whether the alert fires."""
    [rule] = [rule for rule in alert_rules() if rule["alert"] == alert]
    series, labels = [], dict(rule["labels"])
    for name, values in metrics.items():
        bare, _, given = name.partition("{")
        given = given.rstrip("}")
        labels |= {k: v for k, v in re.findall(r'(\w+)="(\w+)"', given) if k != "reason"}
        text = ",".join(filter(None, ['instance="gpu1"', given]))
        series.append({"series": f"{KVTIERS}{bare}{{{text}}}", "values": values})
    labels["instance"] = "gpu1"
    notes = {name: filled(text, labels) for name, text in rule["annotations"].items()}
    expected = [{"exp_labels": labels, "exp_annotations": notes}] if fires else []
    test = {"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": expected}
    return {"interval": "1m", "input_series": series, "alert_rule_test": [test]}


def filled(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)


def run_cases(folder: Path, cases: list[dict[str, object]]) -> subprocess.CompletedProcess[str]:
    path = folder / "tests.yaml"
    suite = {"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": cases}
    path.write_text(yaml.safe_dump(suite))
    return promtool("test", "rules", path)


def test_every_alert_fires_on_a_failing_server_and_not_on_a_healthy_one(tmp_path: Path) -> None:
    names = {rule["alert"] for rule in alert_rules()}
    assert names == SICK.keys() == WELL.keys()
    cases = [case(alert, SICK[alert], fires=True) for alert in SICK]
    cases += [case(alert, WELL[alert], fires=False) for alert in WELL]
    done = run_cases(tmp_path, cases)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fires", [True, False])
def test_a_wrong_expectation_is_detected(tmp_path: Path, fires: bool) -> None:
    metrics = (WELL if fires else SICK)["KvtiersTierTooSmall"]
    done = run_cases(tmp_path, [case("KvtiersTierTooSmall", metrics, fires=fires)])
    assert done.returncode != 0

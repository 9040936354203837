"""The queries of the dashboard and of the alert rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "docs" / "dashboards"


def dashboard() -> Any:
    return json.loads((FOLDER / "grafana.json").read_text())


def alert_rules() -> list[Any]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """The place of each query, and the query."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for rule in alert_rules():
        yield f"alert {rule['alert']}", rule["expr"]

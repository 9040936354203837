"""Grafana's own models of dashboards know every field of ours.

Needs grafana-foundation-sdk, which Grafana generates from its schemas, one version for each version
of Grafana. ``./run test --all`` installs it; without it these tests are skipped. A field that the
models do not know is lost when they read the dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards import dashboard

models = pytest.importorskip(
    "grafana_foundation_sdk.models.dashboard",
    reason="needs Grafana's models: pip install grafana-foundation-sdk",
)


def kept(board: dict[str, Any]) -> Any:
    """The dashboard as Grafana's models write it again."""
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    plugins.register_default_plugins()  # the types of panels, and Prometheus's queries
    return json.loads(json.dumps(models.Dashboard.from_json(board), cls=JSONEncoder))


def lost(ours: Any, found: Any, place: str = "$") -> Iterator[str]:
    """Places whose value is missing or another one."""
    if isinstance(ours, dict) and isinstance(found, dict):
        for name, value in ours.items():
            yield from lost(value, found.get(name), f"{place}.{name}")
    elif isinstance(ours, list) and isinstance(found, list) and len(ours) == len(found):
        for number, (one, other) in enumerate(zip(ours, found, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif ours != found:
        yield place


def test_grafana_knows_every_field() -> None:
    assert list(lost(dashboard(), kept(dashboard()))) == []


def test_an_unknown_field_is_found() -> None:
    board = dashboard()
    board["panels"][1]["options"]["zoom"] = 1
    assert list(lost(board, kept(board))) == ["$.panels[1].options.zoom"]

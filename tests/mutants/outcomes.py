"""A pytest plugin that writes down each test's outcome, for the runner of planted faults."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

TO = "KVTIERS_MUTANTS_OUTCOMES"
"""The environment variable that names the file: one JSON object per line."""


def _write(record: dict[str, object]) -> None:
    with open(os.environ[TO], "a") as file:
        file.write(json.dumps(record) + "\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Check that the product under test is the copy with the fault in it."""
    spec = importlib.util.find_spec("offload")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None or not origin.is_relative_to(session.config.rootpath):
        raise pytest.UsageError(f"offload is imported from {origin}, not from the copy")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"id": nodeid, "outcome": "began", "seconds": 0.0})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _write({"id": report.nodeid, "outcome": report.outcome, "seconds": report.duration})

"""A pytest plugin (``-p tests.results``) that writes down what a run has tested.

With ``KVTIERS_TEST_RESULTS`` set to a folder, a run writes one JSON file there, named after vLLM's
version and the model runner. ``tests.combinations`` makes its table of such files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ENGINE_TESTS = "tests/vllm/"


class Results:
    """Collects the outcome of each test; only the process that controls the others has one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has failed if its set-up, its call or its end has."""
        if report.when == "call" or not report.passed:  # a set-up alone is no test
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if not self._outcomes:
            return
        found = self.as_json()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{found['vllm']}-{found['runner']}.json"
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Counts of the quick tests, and the outcome of each test on real engines."""
        from vllm.version import __version__

        from tests.model_runner import RUNNER

        engines = {n: o for n, o in self._outcomes.items() if n.startswith(ENGINE_TESTS)}
        quick = Counter(o for n, o in self._outcomes.items() if n not in engines)
        version = __version__.partition("+")[0]
        return {"vllm": version, "runner": RUNNER, "quick": dict(quick), "engines": engines}


def pytest_configure(config: pytest.Config) -> None:
    """Collect results if somebody wants them."""
    folder = os.environ.get("KVTIERS_TEST_RESULTS")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(folder)))

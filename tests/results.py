"""A pytest plugin (``-p tests.results``) that writes down what a run has tested.

With ``KVTIERS_TEST_RESULTS`` set to a folder, a run writes one JSON file there, named after vLLM's
version and the model runner. ``tests.combinations`` makes its table of such files. A file names the
commit that was tested and has a digest, so that a file that was changed afterwards is found.

A test that the machine cannot run is skipped with a reason that begins with ``needs``, for example
``needs strace: apt-get install strace``. The file holds these reasons, and a whole run ends with
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ENGINE_TESTS = "tests/vllm/"
NEEDS = "Skipped: needs "
"""How pytest reports a test that lacks something."""


def digest_of(ran: dict[str, Any]) -> str:
    """The digest of everything else in a file of results."""
    rest = {name: value for name, value in ran.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def commit_under_test() -> str:
    """The commit of the tree, with a plus if the tree differs from it; empty without git."""
    root = Path(__file__).resolve().parents[1]
    found = []
    for words in (["rev-parse", "--short=7", "HEAD"], ["status", "--porcelain"]):
        command = ["git", *words]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        found.append(done.stdout.strip())
    commit, changes = found
    return f"{commit}+" if changes else commit


class Results:
    """Collects the outcome of each test; only the process that controls the others has one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[str, str] = {}
        self._needs: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has failed if its set-up, its call or its tear-down has failed."""
        if report.when == "call" or not report.passed:  # a set-up alone is not a test
            self._outcomes[report.nodeid] = report.outcome
        self._note_need(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A whole file may be skipped."""
        self._note_need(report)

    def _note_need(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            _, _, reason = report.longrepr
            if reason.startswith(NEEDS):
                file = report.nodeid.partition("::")[0]
                self._needs.setdefault(reason.removeprefix(NEEDS), set()).add(file)

    def pytest_sessionfinish(self) -> None:
        if not self._outcomes:
            return
        found = self.as_json()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{found['vllm']}-{found['runner']}.json"
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Counts of the quick tests, the outcome of each test on real engines, and what this
        machine lacks, with the files whose tests need it."""
        from vllm.version import __version__

        from tests.model_runner import RUNNER

        engines = {n: o for n, o in self._outcomes.items() if n.startswith(ENGINE_TESTS)}
        quick = Counter(o for n, o in self._outcomes.items() if n not in engines)
        version = __version__.partition("+")[0]
        needs = {what: sorted(files) for what, files in self._needs.items()}
        found = {
            "vllm": version,
            "runner": RUNNER,
            "quick": dict(quick),
            "engines": engines,
            "needs": needs,
            "commit": commit_under_test(),
        }
        return found | {"digest": digest_of(found)}


def pytest_configure(config: pytest.Config) -> None:
    """Collect results if ``KVTIERS_TEST_RESULTS`` is set."""
    folder = os.environ.get("KVTIERS_TEST_RESULTS")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(folder)))

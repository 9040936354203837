"""The benchmark of hooks runs, measures every hook, and reports a missed goal."""

from __future__ import annotations

import json

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from bench import hooks
from bench.__main__ import build


def test_every_hook_is_measured_and_a_missed_goal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "GOAL_CHUNKS", 1024)
    monkeypatch.setattr(hooks, "SCHEDULER_GOAL_US", 0.0)
    config = hooks.Config(chunks=(1024, 2560), keys=(1500,), repeats=2)
    report = hooks.run(config, Progress(disable=True))
    series = {row.series for row in report.rows}
    for hook in ("lookup", "allocated", "build plan", "take in", "ended"):
        assert {f"disk: {hook}", f"cpu: {hook}"} <= series
    assert {"wait: build plan", "store, cpu full, others wait: build plan"} <= series
    assert {"store: build plan", "decode: build plan", "memory"} <= series
    missed = "MISSED, 1,024 chunks, 1,500 keys, cpu: lookup"
    assert any(note.startswith(missed) for note in report.notes)
    monkeypatch.setattr(hooks, "SCHEDULER_GOAL_US", 1e9)
    monkeypatch.setattr(hooks, "RUNNER_GOAL_US", 1e9)
    monkeypatch.setattr(hooks, "GOAL_BYTES_PER_KEY", 1e9)
    assert hooks._verdicts(report) == ["all goals are met"]


def test_from_the_command_line() -> None:
    arguments = ["hooks", "--chunks", "16", "--keys", "100", "--repeats", "1", "--json"]
    done = CliRunner().invoke(build(), arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["question"] == "hooks"

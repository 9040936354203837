"""The gates of the default policy at a tiny size; a policy that is worse than LRU fails them."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from bench import gates
from policies.simulation.trace import TraceWriter
from policies.testing import synthetic_trace


@pytest.fixture
def trace_path(tmp_path: Path) -> str:
    path = tmp_path / "toy.jsonl"
    trace = synthetic_trace(3, requests=400, sessions=30)
    with TraceWriter(path, "toy", trace.block_tokens) as writer:
        for request in trace.requests:
            writer.write(request)
    return str(path)


def _report(path: str) -> gates.Report:
    config = gates.Config((path,), shares=(0.05, 0.2), parts=((0.0, 1.0), (0.5, 1.0)))
    return gates.run(config, Progress(disable=True))


def test_every_case_has_a_verdict(trace_path: str) -> None:
    report = _report(trace_path)
    assert len({row.case for row in report.rows}) == 4
    ours = [row for row in report.rows if row.series == gates.DEFAULT_CPU_POLICY]
    assert len(ours) == 4
    assert all(row.values["gap closed"] <= 1 for row in ours)
    assert any("met in 4 of 4 cases" in note for note in report.notes)


def test_a_worse_policy_fails_the_gates(trace_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "DEFAULT_CPU_POLICY", "lfu")
    assert any("; not in toy" in note for note in _report(trace_path).notes)

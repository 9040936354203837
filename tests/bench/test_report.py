"""What is kept of a benchmark's run."""

from __future__ import annotations

from pathlib import Path

from bench.report import save
from bench.scenario import Report, Row


def test_a_second_run_of_a_day_does_not_write_over_the_first(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        rows = [Row("a case", "a system", {"GB/s": float(number)})]
        report = Report("speed", "Speed", {}, {}, rows)
        path = save(report, "python -m bench speed", "GB/s", tmp_path, more=["GB/s"])
        assert f"| {number}" in path.read_text(encoding="utf-8")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 12, names
    assert {name[len("2026-11-22-") :] for name in names if name.endswith(".md")} == {
        "speed.md",
        "speed-2.md",
        "speed-3.md",
    }

"""Draws the pictures of kept benchmark runs again, from their JSON files.

python scripts/redraw_plots.py [NAME ...]

NAME is that of a file in ``bench/results``; by default, all pictures are drawn.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.__main__ import QUESTIONS
from bench.charts import Chart, draw
from bench.report import RESULTS, from_json
from bench.scenario import Report


def charts_of(report: Report) -> Sequence[Chart]:
    """The charts of the benchmark that made this report."""
    [name] = [name for name in QUESTIONS if report.question.partition("-")[0] == name]
    charts: Sequence[Chart] = importlib.import_module(f"bench.{name}").CHARTS
    return charts


def main(arguments: list[str] | None = None) -> int:
    kept = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != "gpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(arguments).names
    if unknown := sorted(set(names).difference(kept)):
        parser.error(f"{', '.join(unknown)}: no kept run; there are {', '.join(kept)}")
    for name in names or kept:
        report = from_json((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for path in draw(report, charts_of(report), RESULTS / name):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws ``docs/images/serving.png``, the README's chart, from a kept run of ``bench serve``.

python scripts/draw_serving_chart.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.charts import colour_of

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "bench/results/serving-against-others.json"
PICTURE = ROOT / "docs/images/serving.png"
SERIES = (
    *("no offloading", "LMCache server", "SparkCache", "Mooncake Store"),
    *("kvtiers, CPU tier", "kvtiers, disk tier"),
)
"""A series is left out if the run does not contain it."""
APART = 0.8
"""The horizontal distance between two series, in percent."""
PANELS = {
    "TTFT p50 ms": "median time to first token, ms\n(lower is better)",
    "tokens/s": "throughput, tokens/s\n(higher is better)",
}


def draw() -> Figure:
    """One panel for each measure, over the share of the prompt that was stored. Bars are the 95 %
    confidence intervals, where the run has them."""
    run = json.loads(RUN.read_text(encoding="utf-8"))
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    for place, (name, label) in enumerate(PANELS.items(), 1):
        axes = figure.add_subplot(1, 2, place)
        for number, series in enumerate(SERIES):
            rows = [row for row in run["rows"] if row["series"] == series]
            if not rows:
                continue
            rows.sort(key=lambda row: share_of(row["case"]))
            # Next to each other, so that the intervals of two series do not hide each other.
            shares = [share_of(row["case"]) + APART * (number - len(SERIES) // 2) for row in rows]
            values = [row["values"][name] for row in rows]
            axes.errorbar(
                shares,
                values,
                yerr=reach_of(rows, name),
                marker="o",
                markersize=4,
                capsize=2,
                elinewidth=1,
                color=colour_of(series, number),
                label=series,
            )
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_xlabel("share of the prompt stored before, %")
        axes.set_title(label, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def reach_of(rows: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Returns how far the interval of each row extends below and above its value."""
    below, above = [], []
    for row in rows:
        value = row["values"][name]
        low, high = row.get("intervals", {}).get(name, (value, value))
        below.append(max(0.0, value - low))
        above.append(max(0.0, high - value))
    return [below, above]


def share_of(case: str) -> int:
    """``512 tokens, 50% stored before``: 50."""
    match = re.search(r"(\d+)% stored", case)
    return int(match[1]) if match else 0


def main() -> int:
    draw().savefig(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

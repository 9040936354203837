"""Shows the results of simulations: a table, CSV, JSON, a plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.simulation.jobs import ALL_ABOVE, INFINITE, NOTHING, OPTIMUM, SimulationJob
from policies.simulation.simulator import Result

if TYPE_CHECKING:
    from policies.simulation.tables import FittingTable

Outcome = tuple[SimulationJob, Result]


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One mapping per run, sorted by trace, capacity and hit ratio."""
    best = {
        (job.source, job.share): result.token_hit_ratio
        for job, result in outcomes
        if job.policy == OPTIMUM
    }
    found = []
    for job, result in outcomes:
        row: dict[str, Any] = {
            "trace": result.trace,
            "capacity_share": round(job.share, 6),
            "capacity_blocks": result.capacity,
            "policy": result.policy,
            "hints": job.hints,
            "token_hit_ratio": round(result.token_hit_ratio, 6),
            "of_optimum": _ratio(result.token_hit_ratio, best.get((job.source, job.share))),
            "flops_saved": round(result.flops_saved_ratio, 6),
            "stored_blocks": result.stored_blocks,
            "ns_per_op": round(result.ns_per_op, 1),
            "requests": result.requests,
        }
        if job.lower_capacity and not job.timing:
            row["mode"] = job.mode
        row.update({name: round(value, 6) for name, value in result.extra.items()})
        found.append(row)
    if any(job.timing for job, _ in outcomes):
        return found  # in the order of the jobs: without and with look-ahead
    return sorted(found, key=lambda r: (r["trace"], r["capacity_share"], -r["token_hit_ratio"]))


def _ratio(value: float, best: float | None) -> float | None:
    return round(value / best, 4) if best else None


def table(outcomes: Sequence[Outcome]) -> FittingTable:
    """All runs as a table for a terminal."""
    from policies.simulation.tables import FittingTable

    two = any(job.lower_capacity for job, _ in outcomes)
    numbers = ["token hits", "of optimum", "FLOPs saved", "writes", "ns/op"]
    if two:
        numbers[4:4] = ["upper", "lower", "disk writes"]
    headings = ["trace", "capacity", "blocks", "policy", *numbers]
    shown = FittingTable(headings, right=numbers, title="Prefix hits by policy")
    last = None
    for row in rows(outcomes):
        group = (row["trace"], row["capacity_share"])
        if last not in (None, group):
            shown.add_section()
        last = group
        shown.add_row(*_cells(row, two))
    return shown


def timing_table(outcomes: Sequence[Outcome]) -> FittingTable:
    """All runs with arrival times as a table for a terminal."""
    from policies.simulation.tables import FittingTable

    numbers = ["token hits", "upper", "TTFT mean", "TTFT p99", "total"]
    numbers += ["read/needed", "ahead", "wasted"]
    headings = ["trace", "capacity", "policy", "look-ahead", *numbers]
    title = "Time to the first token and total time, in seconds"
    shown = FittingTable(headings, right=numbers, title=title)
    for row in rows(outcomes):
        limit = row["policy"] in (NOTHING, ALL_ABOVE)
        shown.add_row(
            row["trace"],
            "" if limit else f"{row['capacity_share']:,.1%}",
            row["policy"],
            f"{row['look_ahead']:.0%}" if row["look_ahead"] else "off",
            f"{row['token_hit_ratio']:,.1%}",
            f"{row['upper_hit_ratio']:,.1%}",
            *(f"{row[name]:,.3g}" if row[name] < 1000 else f"{row[name]:,.0f}"
              for name in ("ttft_mean_s", "ttft_p99_s", "total_s")),
            f"{row['read_per_needed']:.2f}",
            f"{row['read_ahead_blocks']:,.0f}",
            f"{row['wasted_blocks']:,.0f}",
        )  # fmt: skip
    return shown


def _cells(row: dict[str, Any], two: bool) -> list[str]:
    limit = row["policy"] in (OPTIMUM, INFINITE)
    capacity = row["capacity_share"]
    digits = 1 if capacity >= 0.01 else 3  # "0.0%" would look like a capacity of zero
    share = "all" if row["policy"] == INFINITE else f"{capacity:,.{digits}%}"
    cells = [row["trace"], share, f"{row['capacity_blocks']:,}", row["policy"]]
    cells.append(f"{row['token_hit_ratio']:,.1%}")
    cells.append("" if row["of_optimum"] is None else f"{row['of_optimum']:,.1%}")
    cells.append(f"{row['flops_saved']:,.1%}")
    cells.append("" if limit else f"{row['stored_blocks']:,}")
    if two:
        cells.append(f"{row['upper_ratio']:,.1%}" if "upper_ratio" in row else "")
        cells.append(f"{row['lower_ratio']:,.1%}" if "lower_ratio" in row else "")
        cells.append(f"{row['lower_writes']:,.0f}" if "lower_writes" in row else "")
    cells.append("" if limit else f"{row['ns_per_op']:,.0f}")
    return cells


def json_text(outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> str:
    """One JSON object. ``runs`` are the rows, ``notes`` describe rounded capacities."""
    return json.dumps({"runs": rows(outcomes), "notes": [*notes]}, indent=1, allow_nan=False)


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """The rows as CSV. Missing columns of a row are empty."""
    found = rows(outcomes)
    names = list(dict.fromkeys(name for row in found for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(found)


def write_plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Hit ratio over capacity, one panel per trace. Raises ``ImportError`` without matplotlib."""
    from matplotlib.figure import Figure

    found = [row for row in rows(outcomes) if row["policy"] != INFINITE]
    traces = sorted({row["trace"] for row in found})
    figure = Figure(figsize=(6.0 * len(traces), 4.5), layout="constrained")
    for number, trace in enumerate(traces, 1):
        axes = figure.add_subplot(1, len(traces), number)
        for policy in dict.fromkeys(row["policy"] for row in found):
            points = [r for r in found if r["trace"] == trace and r["policy"] == policy]
            points.sort(key=lambda row: row["capacity_share"])
            style = "k--" if policy == OPTIMUM else "o-"
            axes.plot(
                [100 * point["capacity_share"] for point in points],
                [point["token_hit_ratio"] for point in points],
                style,
                label=policy,
            )
        axes.set_xscale("log")
        axes.set_xlabel("capacity, % of unique blocks")
        axes.set_ylabel("token hit ratio")
        axes.set_title(trace)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path)

"""A report as a table on the screen, as Markdown, as JSON and as bar charts."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.scenario import Report

RESULTS = Path(__file__).parent / "results"


def number(value: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 0.001 <= abs(value) < 1e6:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def show(report: Report, console: Console | None = None) -> None:
    """Print the table and the notes."""
    table = Table(title=report.title)
    table.add_column("case")
    table.add_column("series")
    for name in report.columns():
        table.add_column(name, justify="right")
    before = ""
    for row in report.rows:
        if before and row.case != before:
            table.add_section()
        cells = [number(row.values.get(name)) for name in report.columns()]
        table.add_row("" if row.case == before else row.case, row.series, *cells)
        before = row.case
    console = console or Console()
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}")


def to_json(report: Report) -> str:
    """Everything, for machines. Not-a-number becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and math.isnan(value):
            return None
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [clean(inner) for inner in value]
        return value

    return json.dumps(clean(asdict(report)), indent=1)


def to_markdown(report: Report, command: str) -> str:
    """Table, notes, machine, and the command that made it."""
    columns = report.columns()
    lines = [f"# {report.title}", "", f"Made by `{command}`.", ""]
    lines += [f"* {note}" for note in report.notes]
    lines += ["", _md_row(["case", "series", *columns]), _md_row(["---"] * (2 + len(columns)))]
    for row in report.rows:
        cells = [number(row.values.get(name)) for name in columns]
        lines.append(_md_row([row.case, row.series, *cells]))
    lines += ["", "## Machine", ""]
    lines += [f"* {name}: {value}" for name, value in report.environment.items()]
    return "\n".join(lines) + "\n"


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(report: Report, path: Path, column: str) -> None:
    """Grouped bars of one column: a group per case, a bar per series. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row.case for row in report.rows if column in row.values))
    names = list(dict.fromkeys(row.series for row in report.rows if column in row.values))
    height = 0.8 / max(1, len(names))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * len(cases) * len(names)))
    for index, name in enumerate(names):
        found = {row.case: row.values.get(column, 0.0) for row in report.rows if row.series == name}
        places = [position + index * height for position in range(len(cases))]
        axes.barh(places, [found.get(case, 0.0) for case in cases], height, label=name)
    axes.set_yticks([position + 0.4 - height / 2 for position in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel(column)
    axes.set_title(report.title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save(
    report: Report,
    command: str,
    column: str,
    folder: Path = RESULTS,
    *,
    more: Sequence[str] = (),
) -> Path:
    """Write ``<date>-<question>.{md,json,png}``; the path of the Markdown. Each column of ``more``
    gets a picture of its own, with the column in its name. Nothing kept is written over: the
    second run of a day is called ``<date>-<question>-2``."""
    folder.mkdir(parents=True, exist_ok=True)
    first = f"{datetime.date.today():%Y-%m-%d}-{report.question}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    stem = next(folder / name for name in names if not (folder / f"{name}.json").exists())
    stem.with_suffix(".json").write_text(to_json(report))
    plot(report, stem.with_suffix(".png"), column)
    for other in more:
        name = re.sub("[^a-z0-9]+", "-", other.lower())
        plot(report, stem.with_name(f"{stem.name}-{name}.png"), other)
    markdown = stem.with_suffix(".md")
    markdown.write_text(to_markdown(report, command))
    return markdown


def deliver(
    report: Report,
    *,
    command: str,
    column: str,
    as_json: bool,
    keep: bool,
    more: Sequence[str] = (),
) -> None:
    """What every command does at its end: JSON or a table, and files if they are to be kept."""
    if as_json:
        print(to_json(report))
    else:
        show(report)
    if keep:
        path = save(report, command, column, more=more)
        if not as_json:
            Console().print(f"kept as {path}")

"""Shows a report as a table on the screen, as Markdown and as JSON, and keeps it in files."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.charts import Chart, draw
from bench.scenario import Report, Row, number_text

RESULTS = Path(__file__).parent / "results"


def show(report: Report, console: Console | None = None) -> None:
    """Print the table and the notes. If the table is too wide, print one table per case instead,
    with a column per series."""
    console = console or Console()
    table = _rows_by_series(report)
    needed = console.measure(table, options=console.options.update(width=10**6)).maximum
    if needed <= console.width:
        console.print(table)
    else:
        console.print(report.title, style="italic", justify="center")
        for case in dict.fromkeys(row.case for row in report.rows):
            console.print(_columns_by_series(report, case))
    for note in report.notes:
        console.print(f"  {note}")


def _rows_by_series(report: Report) -> Table:
    table = Table(title=report.title)
    table.add_column("case")
    table.add_column("series")
    for name in report.columns():
        table.add_column(name, justify="right")
    before = ""
    for row in report.rows:
        if before and row.case != before:
            table.add_section()
        cells = [number_text(row.values.get(name)) for name in report.columns()]
        table.add_row("" if row.case == before else row.case, row.series, *cells)
        before = row.case
    return table


def _columns_by_series(report: Report, case: str) -> Table:
    rows = [row for row in report.rows if row.case == case]
    table = Table(title=case)
    table.add_column("")
    for row in rows:
        table.add_column(row.series, justify="right")
    for name in report.columns():
        if any(name in row.values for row in rows):
            table.add_row(name, *(number_text(row.values.get(name)) for row in rows))
    return table


def to_json(report: Report) -> str:
    """The whole report in machine-readable form. Not-a-number becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and math.isnan(value):
            return None
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [clean(inner) for inner in value]
        return value

    today = f"{datetime.date.today():%Y-%m-%d}"
    return json.dumps({"date": today} | clean(asdict(report)), indent=1)


def from_json(text: str) -> Report:
    """The report that ``to_json`` wrote. Null becomes not-a-number."""
    found = json.loads(text)
    rows = []
    for row in found["rows"]:
        values = {
            name: math.nan if value is None else value for name, value in row["values"].items()
        }
        known = {name: (low, high) for name, (low, high) in row.get("intervals", {}).items()}
        rows.append(Row(row["case"], row["series"], values, known))
    return Report(
        found["question"],
        found["title"],
        found["config"],
        found["environment"],
        rows,
        found["notes"],
    )


def to_markdown(report: Report, command: str) -> str:
    """Table, notes, machine, and the command that made it."""
    today = f"{datetime.date.today():%Y-%m-%d}"
    lines = [f"# {report.title}", "", f"Made by `{command}` on {today}.", ""]
    lines += [f"* {note}" for note in report.notes]
    lines += ["", *markdown_table(report), "", "## Machine", ""]
    lines += [f"* {name}: {value}" for name, value in report.environment.items()]
    return "\n".join(lines) + "\n"


def markdown_table(report: Report) -> list[str]:
    """The lines of a Markdown table with all rows."""
    columns = report.columns()
    lines = [_md_row(["case", "series", *columns]), _md_row(["---"] * (2 + len(columns)))]
    for row in report.rows:
        cells = [number_text(row.values.get(name)) for name in columns]
        lines.append(_md_row([row.case, row.series, *cells]))
    return lines


def _md_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def save(
    report: Report, command: str, charts: Sequence[Chart], folder: Path = RESULTS, *, name: str = ""
) -> Path:
    """Write ``<name>.{md,json,png}`` and return the path of the Markdown file. ``name`` states the
    question. A later run for the same question overwrites the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (name or report.question)
    stem.with_name(f"{stem.name}.json").write_text(to_json(report))
    draw(report, charts, stem)
    markdown = stem.with_name(f"{stem.name}.md")
    markdown.write_text(to_markdown(report, command))
    return markdown


def command_line(name: str) -> str:
    """The command that runs the benchmark ``name`` with the arguments of this process. Paths are
    shortened to their last part, because only this machine has the rest."""
    words = sys.argv[1:]
    if words[:1] == [name]:  # absent if the benchmark's module was run instead of ``bench``
        del words[0]
    return shlex.join(["python", "-m", "bench", name, *map(_without_folders, words)])


def _without_folders(word: str) -> str:
    if word.startswith("{"):  # JSON
        return word
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{PurePath(value).name or value}"


def deliver(
    report: Report,
    charts: Sequence[Chart],
    *,
    command: str,
    as_json: bool,
    keep: bool,
    name: str = "",
) -> None:
    """Finish a command: print JSON or a table, and write files if requested."""
    if as_json:
        print(to_json(report))
    else:
        show(report)
    if keep:
        path = save(report, command, charts, name=name)
        if not as_json:
            Console().print(f"kept as {path}")

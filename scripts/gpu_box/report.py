"""Turns the results of ``run.py`` into ``bench/results/gpu.json`` and ``gpu.md``, and writes into
the guide how each probe ended.

python scripts/gpu_box/report.py RESULTS [--to bench/results] [--guide docs/guides/gpu.md]

RESULTS is the ``results.json`` that ``run.py`` wrote, or its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run import HERE, RESULTS, ROOT, schedule

sys.path.insert(0, str(ROOT))

from bench.report import markdown_table
from bench.scenario import Report, Row

BEGIN = "<!-- written by scripts/gpu_box/report.py -->"
END = "<!-- end -->"


def table(numbers: Any, indent: str = "") -> list[str]:
    """Numbers as a nested list."""
    lines = []
    for name, value in numbers.items():
        if name == "report":  # of a benchmark
            lines += benchmark(value)
        elif isinstance(value, Mapping):
            lines += [f"{indent}* {name}", *table(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{indent}* {name}: {', '.join(map(str, value)) or 'none'}"]
        else:
            lines.append(f"{indent}* {name}: {value}")
    return lines


def benchmark(found: Mapping[str, Any]) -> list[str]:
    """A benchmark's rows as a table, and its notes."""
    rows = [Row(row["case"], row["series"], row["values"]) for row in found["rows"]]
    report = Report(found["question"], found["title"], {}, {}, rows)
    return ["", *markdown_table(report), "", *(f"* {note}" for note in found["notes"]), ""]


def endings(results: list[dict[str, Any]]) -> list[str]:
    """A table of how every probe ended."""
    head = ["| probe | | ended | s |", "| --- | --- | --- | --- |"]
    rows = [
        f"| {one['name']} | {one['about']} | {one['status']} | {one['seconds']} |"
        for one in results
    ]
    return head + rows


def write_into(guide: Path, results: list[dict[str, Any]], numbers: Path) -> None:
    """Replace what stands between the two comments of the guide. Exits if it has none."""
    text = guide.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise SystemExit(f"{guide} lacks the lines {BEGIN!r} and {END!r}")
    link = os.path.relpath(numbers, guide.parent)
    lines = ["", *endings(results), "", f"[All numbers]({link})", ""]
    guide.write_text(head + begin + "\n".join(lines) + end + tail)


def page(results: list[dict[str, Any]]) -> str:
    """Make the page: how every probe ended, and its numbers."""
    lines = ["# On a GPU", "", "Made by `python scripts/gpu_box/report.py`.", "", *endings(results)]
    for one in results:
        if one["numbers"] or one["status"] != "ok":
            lines += ["", f"## {one['name']}: {one['status']}", ""]
        if one["numbers"]:
            lines += table(one["numbers"])
        if one["status"] not in ("ok", "not run"):
            lines += ["", "```", *one["tail"].strip().splitlines()[-15:], "```"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "bench/results")
    parser.add_argument("--guide", type=Path, default=ROOT / "docs/guides/gpu.md")
    parser.add_argument("--schedule", type=Path, default=HERE / "schedule.toml")
    options = parser.parse_args(arguments)
    source = options.results / RESULTS if options.results.is_dir() else options.results
    if not source.is_file():
        parser.error(f"{source} is missing: give the folder or the results.json of run.py")
    found = json.loads(source.read_text())
    results = []
    for probe in schedule(options.schedule):
        missing = {"name": probe.name, "about": probe.about, "status": "not run", "seconds": ""}
        results.append(found.get(probe.name) or missing | {"numbers": None})
    options.to.mkdir(parents=True, exist_ok=True)
    (options.to / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.to / "gpu.md").write_text(page(results))
    write_into(options.guide, results, options.to / "gpu.md")
    print(options.to / "gpu.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

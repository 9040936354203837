"""Files and plots of a benchmark run."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench.charts import (
    COLOURS,
    HATCHES,
    OTHERS,
    PAGE_INCHES,
    SERIES_MAX,
    Chart,
    bars_of,
    colour_of,
    pictures_of,
    plot,
    system_of,
    trace_label,
)
from bench.report import RESULTS, command_line, from_json, save, show, to_json
from bench.scenario import Report, Row, size_text
from bench.tiers import plotted
from tests.scripts import load_script


def report_of(series: int, cases: int, column: str = "GB/s") -> Report:
    rows = [
        Row(f"case {case}", f"system {number}", {column: 1.0 + number})
        for case in range(cases)
        for number in range(series)
    ]
    return Report("speed", "Speed", {}, {}, rows)


def kept_runs() -> Iterator[tuple[Path, Report, Sequence[Chart]]]:
    """The path without suffix, the report and the charts of each run."""
    charts_of = load_script("redraw_plots").charts_of
    for path in RESULTS.glob("*.json"):
        if path.stem != "gpu":  # not from a benchmark
            report = from_json(path.read_text(encoding="utf-8"))
            yield path.with_suffix(""), report, charts_of(report)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["tiers", "--keep", "--sizes", "2MiB"], "tiers --keep --sizes 2MiB"),
        (["--keep"], "tiers --keep"),  # python -m bench.tiers
        (
            ["tiers", "--folder", "/mnt/disk", "--model=some/model"],
            "tiers --folder disk --model=model",
        ),
        (["tiers", "--engine", '{"a": "b/c"}'], """tiers --engine '{"a": "b/c"}'"""),
    ],
)
def test_a_report_has_the_command_without_folders(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert command_line("tiers") == f"python -m bench {command}"


def test_a_later_run_for_a_question_replaces_the_earlier_one(tmp_path: Path) -> None:
    for number in (1, 2):
        rows = [Row("a case", "a system", {"GB/s": float(number), "keys/s": 1.0})]
        report = Report("speed", "Speed", {}, {}, rows)
        path = save(
            report, "a command", [Chart("GB/s"), Chart("keys/s")], tmp_path, name="disk-speed"
        )
        assert f"| {number}" in path.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "disk-speed-keys-s.png",
        "disk-speed.json",
        "disk-speed.md",
        "disk-speed.png",
    ]
    assert (
        json.loads((tmp_path / "disk-speed.json").read_text())["rows"][0]["values"]["GB/s"] == 2.0
    )


@pytest.mark.parametrize(("series", "cases"), [(2, 3), (17, 6), (51, 4), (6, 36), (9, 9)])
def test_a_plot_has_few_series_and_fits_a_page(series: int, cases: int, tmp_path: Path) -> None:
    report = report_of(series, cases)
    assert len(bars_of(report, Chart("GB/s")).series) <= SERIES_MAX
    width, height = plot(report, tmp_path / "a.png", Chart("GB/s"))
    assert width <= PAGE_INCHES[0]
    assert height <= PAGE_INCHES[1]


def test_many_series_and_few_cases_are_swapped() -> None:
    bars = bars_of(report_of(17, 3), Chart("GB/s"))
    assert bars.series == ["case 0", "case 1", "case 2"]
    assert len(bars.groups) == 17
    assert bars.values["system 4", "case 2"] == 5.0


def test_groups_beyond_the_page_are_counted() -> None:
    bars = bars_of(report_of(6, 36), Chart("GB/s"))
    assert len(bars.groups) == 17
    assert bars.left_out == 19


def test_a_system_has_one_colour_everywhere() -> None:
    assert colour_of("lmdb tier", 0) == colour_of("lmdb tier", 3) == COLOURS["lmdb tier"]
    assert colour_of("vLLM tiering, fs", 1) == colour_of("vLLM fs", 5)
    assert colour_of("lru_trace, 1%", 0) != colour_of("lru_trace, 1%", 1), "no system"
    assert colour_of("kvtiers, CPU tier", 0) == COLOURS["kvtiers, CPU tier"]
    assert set(OTHERS).isdisjoint(COLOURS.values())
    assert len(OTHERS) == len(set(HATCHES)) == SERIES_MAX


def test_a_system_has_its_colour_where_it_labels_a_bar() -> None:
    systems = ["all in the CPU tier", "all on disk", "all on disk, look-ahead", "LMCache server"]
    own = [colour_of(name, 0) for name in systems]
    assert len(set(own)) == len(systems)
    for cases in ("a", "ab"):
        rows = [Row(name, case, {"s": 1.0}) for name in systems for case in cases]
        if cases == "a":  # one case: the systems become the labels
            rows = [dataclasses.replace(row, case="a", series=row.case) for row in rows]
        bars = bars_of(Report("q", "T", {}, {}, rows), Chart("s"))
        assert bars.groups == systems
        assert [bars.colours(number) for number in range(len(cases))] == [own] * len(cases)
        patterns = [bars.pattern(number) for number in range(len(cases))]
        assert all(one not in patterns[:at] for at, one in enumerate(patterns))


def test_kept_pictures_have_short_labels_and_a_colour_for_each_system() -> None:
    for stem, report, charts in kept_runs():
        for chart in charts:
            bars = bars_of(report, chart)
            assert max(map(len, bars.groups)) <= 40, stem.name
            systems = {name for name in map(system_of, [*bars.groups, *bars.series]) if name}
            assert len({COLOURS[name] for name in systems}) == len(systems), stem.name


def test_the_axis_shows_which_direction_is_better() -> None:
    assert Chart("GB/s").axis == "GB/s (higher is better)"
    assert Chart("us").axis == Chart("us", cost=True).axis == "us (lower is better)"
    assert Chart("TTFT p50 ms").axis == "TTFT p50 ms (lower is better)"
    assert Chart("ratio", cost=True).axis == "ratio (lower is better)"
    assert Chart("share", unit="share of raw").axis == "share of raw (higher is better)"


def test_intervals_are_drawn_where_they_are_known() -> None:
    rows = [
        Row("a", "x", {"ratio": 2.0}, {"ratio": (1.5, 3.0)}),
        Row("a", "y", {"ratio": 1.0}),
    ]
    bars = bars_of(Report("q", "T", {}, {}, rows), Chart("ratio"))
    assert bars.intervals == {("x", "a"): (1.5, 3.0)}
    assert not math.isnan(bars.values["y", "a"])


def test_a_missing_bar_and_one_that_is_too_short_have_texts() -> None:
    rows = [Row("a", "x", {"ratio": 2.0}), Row("a", "y", {"ratio": 0.0}), Row("b", "x", {})]
    bars = bars_of(Report("q", "T", {}, {}, rows), Chart("ratio"))
    assert bars.text_instead(2.0) == ""
    assert bars.text_instead(0.0) == "0.000"
    assert bars.text_instead(math.nan) == "no value"


def test_the_order_of_systems_does_not_depend_on_the_run() -> None:
    systems = ["no offloading", "kvtiers, disk tier", "LMCache server", "kvtiers, CPU tier"]
    for names in (systems, systems[::-1]):
        for cases in ("a", "ab"):
            rows = [Row(case, name, {"ratio": 1.0}) for case in cases for name in names]
            bars = bars_of(Report("q", "T", {}, {}, rows), Chart("ratio"))
            shown = bars.groups if cases == "a" else bars.series
            assert shown == [systems[3], systems[1], systems[0], systems[2]]


def test_pictures_show_traces_without_the_names_of_their_files() -> None:
    for case in ("tau_airline_16, 5.0%", "tau_airline[0:1], 5.0%", "tau_airline_dev_512, 5.0%"):
        assert trace_label(case) == "tau airline, capacity 5.0%"
    assert trace_label("tau_airline_16 [0.5:1], 1.0%") == "tau airline [0.5:1], capacity 1.0%"


def test_a_report_is_read_from_its_json() -> None:
    rows = [Row("a", "x", {"ratio": 2.0, "s": math.nan}, {"ratio": (1.5, 3.0)})]
    report = Report("q", "T", {"rounds": 2}, {"cpu": "one"}, rows, ["a note"])
    again = from_json(to_json(report))
    assert math.isnan(again.rows[0].values["s"])
    assert to_json(again) == to_json(report)


@pytest.mark.parametrize("width", [80, 200])
def test_every_number_is_readable_on_any_terminal(width: int) -> None:
    values = {f"measurement {index:02}": 1234.0 + index for index in range(12)}
    rows = [Row(case, series, values) for case in ("one", "two") for series in ("a", "b")]
    page = io.StringIO()
    console = Console(width=width, file=page)
    show(Report("speed", "Speed", {}, {}, rows), console)
    printed = page.getvalue()
    for name, value in values.items():
        assert name in printed
        assert printed.count(f"{value:.0f}") == len(rows)


def test_each_question_is_kept_once() -> None:
    """Names state the question; with a date in the name, older runs would stay beside newer
    ones."""
    stems = sorted(path.stem for path in RESULTS.glob("*.json"))
    dated = re.compile(r"20\d\d-?[01]\d")
    assert dated.search("backlog-2026-11-24")
    assert [stem for stem in stems if dated.search(stem)] == []
    for stem in stems:
        assert (RESULTS / f"{stem}.md").is_file()
        assert (RESULTS / f"{stem}.png").is_file()


def test_no_two_kept_pictures_have_the_same_title() -> None:
    """Only pictures of one run may: they show the same question in other units."""
    titles: list[str] = []
    for stem, report, charts in kept_runs():
        assert all(bars_of(report, chart).values for chart in charts), stem.name
        titles += {chart.title or report.title for chart in charts}
    assert len(set(titles)) == len(titles), sorted(titles)


def test_each_kept_picture_is_of_a_chart() -> None:
    drawn = [path for stem, _, charts in kept_runs() for path in pictures_of(charts, stem)]
    assert sorted(RESULTS.glob("*.png")) == sorted(drawn)


def test_kept_pictures_can_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("redraw_plots")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    shutil.copy(RESULTS / "policy-cost-and-hits.json", tmp_path)
    assert script.main([]) == 0
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in RESULTS.glob("policy-cost-and-hits*.png")}


def test_the_plot_shows_two_sizes_at_one_depth() -> None:
    sizes = [64 << 10, 256 << 10, 1 << 20, 2 << 20]
    points = [*((size, 4) for size in sizes), (2 << 20, 8)]

    def shown(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
        cases = {
            f"write, {size_text(size)}, depth {depth}": (size, depth) for size, depth in points
        }
        rows = [Row(case, system, {}) for case in cases for system in ("memcpy", "lmdb tier")]
        found = plotted(Report("tiers", "T", {"points": points}, {}, rows))
        assert {row.series for row in found} == {"lmdb tier"}
        return [cases[row.case] for row in found]

    assert shown(points) == [(256 << 10, 4), (2 << 20, 4)]
    assert shown([(64 << 10, 2)]) == [(64 << 10, 2)]

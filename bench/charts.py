"""Draws the rows of a report as bar charts, with one colour per system in all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenario import Report, Row, number_text

SERIES_MAX = 6
"""Maximum number of bars in a group, so that a reader can distinguish them. If there are more
series, or only one case, series and cases are swapped."""
BARS_MAX = 102
SHORTEST_BAR = 0.005
"""Share of the longest bar below which a bar cannot be seen."""
LABEL_CHARACTERS = 28
"""If a label is longer than this, the legend has two columns instead of three."""
PAGE_INCHES = (7.2, 10.0)
"""Width and maximum height in inches, to fit a printed page."""

LOWER_IS_BETTER = frozenset({"us", "s", "ms", "ns/op", "CPU s", "CPU s/GB", "bytes on disk"})
"""Columns that are costs. Columns that begin with ``TTFT`` are costs too; all others are gains."""

COLOURS = {
    "kvtiers": "#1f5fa8",
    "kvtiers, CPU tier": "#6ba3e0",
    "kvtiers, disk tier": "#1f5fa8",
    "lmdb tier": "#1f5fa8",
    "lmdb tier, calls of a server": "#6ba3e0",
    "shared lmdb tier": "#4f86c6",
    "file tier": "#7fb8a4",
    "Mooncake tier": "#1f5fa8",
    "Mooncake's client": "#555555",
    "raw O_DIRECT": "#555555",
    "memcpy": "#999999",
    "memmove per page": "#999999",
    "one large copy": "#555555",
    "nothing stored": "#555555",
    "all in the CPU tier": "#6ba3e0",
    "all on disk": "#1f5fa8",
    "all on disk, look-ahead": "#17a2b8",
    "all on disk, default options": "#123a6b",
    "all on disk, default options, waits": "#8496b5",
    "disk tier": "#1f5fa8",
    "disk tier, look-ahead": "#17a2b8",
    "no offloading": "#555555",
    "vLLM": "#e07b39",
    "LMCache": "#8e5ea2",
    "SparkCache": "#3a9d5d",
    "Mooncake Store": "#c0504d",
    "adaptive": "#1f5fa8",
    "adaptive + ends": "#6ba3e0",
    "lru": "#e07b39",
    "optimum": "#555555",
}
"""One colour per system in every plot, chosen by the longest name with which a label begins. The
systems of a plot are in this order."""
OTHERS = ("#0f766e", "#d4a017", "#b23a48", "#7a9e3a", "#c97fb2", "#5c4b8a")
"""Colours of series that are not systems: cases, sizes. No system has one of them."""
HATCHES = ("", "////", "....", "xxxx", "++", "oo")
"""Patterns of series whose bars have the colours of the systems that label them."""
NEUTRAL = "#bbbbbb"
"""The colour of these patterns in the legend."""


def system_of(label: str) -> str | None:
    """The system that a series or group measures, or ``None`` if it is a case or a size."""
    named = [name for name in COLOURS if re.match(rf"{re.escape(name)}\b(?!_)", label)]
    return max(named, key=len, default=None)


def colour_of(label: str, number: int) -> str:
    """The colour of a system; for any other label, the ``number``-th of the other colours."""
    known = system_of(label)
    return COLOURS[known] if known else OTHERS[number % len(OTHERS)]


def _order_of(label: str) -> int:
    known = system_of(label)
    return list(COLOURS).index(known) if known else len(COLOURS)


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of a report.

    ``column`` has the values that the bars show, and ``unit`` describes them on the axis (default:
    the column's name). ``title`` is the question that the picture answers (default: that of the
    report). ``rows`` selects the rows of the report, and may give them other labels. ``cost`` says
    whether lower values are better; by default, the column's name decides.
    """

    column: str
    unit: str = ""
    title: str = ""
    rows: Callable[[Report], Sequence[Row]] | None = None
    cost: bool | None = None

    @property
    def axis(self) -> str:
        """The label of the axis, which says which direction is better."""
        is_cost = self.cost
        if is_cost is None:
            is_cost = self.column in LOWER_IS_BETTER or self.column.startswith("TTFT")
        return f"{self.unit or self.column} ({'lower' if is_cost else 'higher'} is better)"


def trace_label(case: str) -> str:
    """The label of a case in a picture: ``mooncake conversation, capacity 5.0%`` for
    ``mooncake_conversation_dev_512, 5.0%``."""
    trace, _, share = case.partition(", ")
    trace = re.sub(r"(_dev|_first\d+|_\d+)+(?=[ \[]|$)", "", trace)
    return f"{trace.replace('[0:1]', '').replace('_', ' ')}, capacity {share}"


@dataclass(slots=True)
class Bars:
    """The content of a plot: groups of bars with one bar per series, and intervals if they are
    known."""

    groups: list[str]
    series: list[str]
    values: dict[tuple[str, str], float]
    intervals: dict[tuple[str, str], tuple[float, float]]
    left_out: int

    @property
    def has_systems_as_groups(self) -> bool:
        """Whether groups have the systems' colours, and patterns distinguish the series."""
        return not any(map(system_of, self.series)) and any(map(system_of, self.groups))

    def colours(self, number: int) -> list[str]:
        """The colours of the bars of the ``number``-th series, one for each group."""
        if self.has_systems_as_groups:
            return [colour_of(group, 0) for group in self.groups]
        return [colour_of(self.series[number], number)] * len(self.groups)

    def key_colour(self, number: int) -> str:
        """The colour of the ``number``-th series in the legend."""
        return NEUTRAL if self.has_systems_as_groups else colour_of(self.series[number], number)

    def pattern(self, number: int) -> dict[str, Any]:
        """The pattern of the bars of the ``number``-th series, as options of matplotlib."""
        hatch = HATCHES[number] if self.has_systems_as_groups else ""
        return {"hatch": hatch, "edgecolor": "white", "linewidth": 0} if hatch else {}

    def text_instead(self, value: float) -> str:
        """The text in place of a bar that cannot be seen; empty if it can."""
        if math.isnan(value):
            return "no value"
        longest = max(abs(value) for value in self.values.values() if not math.isnan(value))
        return number_text(value) if abs(value) < SHORTEST_BAR * longest else ""


def bars_of(report: Report, chart: Chart) -> Bars:
    """At most ``SERIES_MAX`` series and ``BARS_MAX`` bars, from the first groups of the report.
    The series of a report with one case become its groups, so that their labels are at the bars."""
    column = chart.column
    found = report.rows if chart.rows is None else chart.rows(report)
    rows = [row for row in found if column in row.values]
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.series for row in rows))
    is_turned = len(cases) < len(names) and (len(names) > SERIES_MAX or len(cases) == 1)
    if len(cases) == 1:
        names.sort(key=_order_of)
    groups, series = (names, cases) if is_turned else (cases, names)
    series = sorted(series[:SERIES_MAX], key=_order_of)
    shown = groups[: BARS_MAX // max(1, len(series))]
    values, intervals = {}, {}
    for row in rows:
        bar = (row.series, row.case) if is_turned else (row.case, row.series)
        values[bar] = row.values[column]
        if column in row.intervals:
            intervals[bar] = row.intervals[column]
    return Bars(shown, series, values, intervals, len(groups) - len(shown))


def plot(report: Report, path: Path, chart: Chart) -> tuple[float, float]:
    """Draw grouped bars and return the size in inches. A bar that is missing, or too short to see,
    gets a text. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    bars = bars_of(report, chart)
    count = len(bars.groups) * len(bars.series)
    size = (PAGE_INCHES[0], min(PAGE_INCHES[1], 1.6 + 0.2 * count))
    height = 0.8 / max(1, len(bars.series))
    figure, axes = plt.subplots(figsize=size)
    for number, name in enumerate(bars.series):
        positions = [at + number * height for at in range(len(bars.groups))]
        values = [bars.values.get((group, name), math.nan) for group in bars.groups]
        axes.barh(positions, values, height, color=bars.colours(number), **bars.pattern(number))
        for position, group, value in zip(positions, bars.groups, values, strict=True):
            if (group, name) in bars.intervals:
                low, high = bars.intervals[group, name]
                reach = [[max(0, value - low)], [max(0, high - value)]]
                axes.errorbar(value, position, xerr=reach, color="black", capsize=2, linewidth=1)
            elif text := bars.text_instead(value):
                axes.text(0, position, f" {text}", va="center", fontsize=6, color="#555555")
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(bars.groups))], bars.groups)
    axes.tick_params(axis="y", labelsize=8 if count <= 60 else 6)
    axes.invert_yaxis()
    left_out = f"; {bars.left_out} more in the table" if bars.left_out else ""
    axes.set_xlabel(chart.axis + left_out)
    title = chart.title or report.title
    figure.suptitle(title, fontsize=10, wrap=True)
    if bars.has_systems_as_groups and len(bars.series) == 1:
        if bars.series[0] not in title.replace(",", ""):
            axes.set_title(bars.series[0], fontsize=9)
    else:
        columns = 3 if max(map(len, bars.series), default=0) < LABEL_CHARACTERS else 2
        keys = [
            Patch(facecolor=bars.key_colour(number), label=name, **bars.pattern(number))
            for number, name in enumerate(bars.series)
        ]
        figure.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=columns)
    axes.grid(axis="x", alpha=0.3)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return size


def pictures_of(charts: Sequence[Chart], stem: Path) -> list[Path]:
    """``<stem>.png`` for the first chart, and ``<stem>-<column>.png`` for each other one."""
    slugs = ["-" + re.sub("[^a-z0-9]+", "-", chart.column.lower()) for chart in charts[1:]]
    return [stem.with_name(f"{stem.name}{slug}.png") for slug in ("", *slugs)][: len(charts)]


def draw(report: Report, charts: Sequence[Chart], stem: Path) -> list[Path]:
    """Draw the pictures and return their paths."""
    paths = pictures_of(charts, stem)
    for chart, path in zip(charts, paths, strict=True):
        plot(report, path, chart)
    return paths

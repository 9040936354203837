"""The parts of a benchmark: a frozen configuration, rows of numbers, and a progress bar.

Each question has one module ``bench/<name>.py`` with

    @dataclass(frozen=True, slots=True)
    class Config: ...                                # everything that changes the numbers
    def run(config: Config, progress: Progress) -> Report: ...
    def register(app: typer.Typer) -> None: ...      # the command line only parses

and appears as ``python -m bench <name>`` once its name is in ``bench.__main__.QUESTIONS``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: ``case`` is what was done, ``series`` is the system that did it.
    ``intervals`` has the lowest and highest plausible values of some columns, for plots."""

    case: str
    series: str
    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """All rows of one run. ``title`` is the question as a sentence. ``config`` and ``environment``
    must be plain JSON values."""

    question: str
    title: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def columns(self) -> list[str]:
        """Names of all values, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def progress_bar() -> AbstractContextManager[Progress]:
    """A progress bar with the current task, the share done, and the time left. It goes to standard
    error, because standard output is for the report, which may be JSON."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def median(values: Sequence[float]) -> float:
    """The median, or NaN without values."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value."""
    return min(values), max(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all values lies (nearest-rank percentile)."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def number_text(value: float | None) -> str:
    """Three significant digits, or a dash for a value that was not measured."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 0.001 <= abs(value) < 1e6:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def size_text(byte_count: int) -> str:
    """``2 MiB`` for 2097152."""
    for unit, factor in _UNITS.items():
        if byte_count >= factor and byte_count % factor == 0:
            return f"{byte_count // factor} {unit}"
    return f"{byte_count} B"


def parse_size(text: str) -> int:
    """2097152 for ``2MiB``, ``2 MiB`` or ``2097152``. Raises ``ValueError``."""
    for unit, factor in _UNITS.items():
        if text.strip().lower().endswith(unit.lower()):
            return int(float(text.strip()[: -len(unit)]) * factor)
    return int(text)

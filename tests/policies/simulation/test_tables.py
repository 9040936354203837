"""Tables are readable on a terminal of any width: no word and no number is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from policies.simulation.tables import FittingTable

HEADINGS = ("tier", "capacity", "tokens per second", "last use")
ROWS = (("cpu", "64GiB", "16,773,119", "9s to 3s"), ("a-long-name", "2TiB", "", "3d to 1h"))


def shown(width: int) -> list[str]:
    table = FittingTable(HEADINGS, right=HEADINGS[1:], title="[red]plain")
    for row in ROWS:
        table.add_row(*row)
        table.add_section()
    out = Console(file=io.StringIO(), width=width, highlight=False)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(31, 70))
def test_no_cell_is_broken_at_any_width(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row):
        assert any(cell in line for line in lines), f"{cell} in\n" + "\n".join(lines)


def test_a_table_without_rows_shows_its_headings() -> None:
    out = Console(file=io.StringIO(), width=60)
    with out.capture() as found:
        out.print(FittingTable(HEADINGS))
    assert "tokens per second" in found.get()


def test_the_three_forms() -> None:
    assert any("┃ tier" in line for line in shown(60))
    narrow = shown(46)
    assert not any("┃" in line or "│" in line for line in narrow)
    assert sum("cpu" in line for line in narrow) == 1
    assert shown(30) == [
        *("tier               cpu", "capacity           64GiB"),
        *("tokens per second  16,773,119", "last use           9s to 3s", ""),
        *("tier               a-long-name", "capacity           2TiB"),
        "last use           3d to 1h",
    ]


def test_only_characters_that_are_not_shown_are_escaped() -> None:
    table = FittingTable(("trace",))
    table.add_row("grüße 東京 \x1b[31mred\ttab")
    out = Console(file=io.StringIO(), width=60, highlight=False)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    assert "grüße 東京 \\x1b[31mred\\ttab" in out.file.getvalue()

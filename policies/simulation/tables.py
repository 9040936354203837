"""A table for a terminal of any width, for all commands that print tables.

``rich`` breaks words and numbers if a table is too wide. This table then omits its vertical lines.
If it is still too wide, it shows each row as a block of lines.

The module is here and not in ``offload.cli``, because ``kvtiers simulate`` prints tables too, and
policies import nothing of ``offload``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between two columns that have no line between them."""


def printable(text: str) -> str:
    """Write characters that a terminal obeys or does not show, such as ESC, as escapes.

    A client chooses the id of its request, and a trace its name.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class FittingTable:
    """Headings and rows of plain text. Columns named in ``right`` are aligned to the right."""

    def __init__(
        self, headings: Sequence[str], right: Collection[str] = (), title: str = ""
    ) -> None:
        self._headings = headings
        self._right = right
        self._title = title
        self._rows: list[tuple[str, ...]] = []
        self._section_ends: set[int] = set()

    def add_row(self, *cells: str) -> None:
        self._rows.append(tuple(map(printable, cells)))

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self._section_ends.add(len(self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(self._headings, *self._rows, strict=True))
        full = [max(map(cell_len, column)) for column in columns]
        # a heading may be broken between words, a cell may not
        narrow = [max([_width_needed(head), *map(cell_len, cells)]) for head, *cells in columns]
        if sum(full) + 3 * len(full) + 1 <= options.max_width:
            yield self._table(HEAVY_HEAD, full)
        elif sum(narrow) + GAP * (len(narrow) - 1) <= options.max_width:
            yield self._table(SIMPLE_HEAD, narrow)
        else:
            yield self._blocks()

    def _table(self, box: Box, widths: list[int]) -> Table:
        lines = box is HEAVY_HEAD
        table = Table(
            title=self._title or None,
            box=box,
            show_edge=lines,
            padding=(0, 1) if lines else (0, 0, 0, GAP - 1),
            pad_edge=lines,
        )
        for heading, width in zip(self._headings, widths, strict=True):
            side: Literal["left", "right"] = "right" if heading in self._right else "left"
            table.add_column(Text(heading), justify=side, width=width)
        for row, cells in enumerate(self._rows):
            if row in self._section_ends:
                table.add_section()
            table.add_row(*map(Text, cells))
        return table

    def _blocks(self) -> Table:
        """Each row as lines of a heading and a cell."""
        grid = Table.grid(padding=(0, GAP))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for row, cells in enumerate(self._rows):
            if row:
                grid.add_row()
            for heading, cell in zip(self._headings, cells, strict=True):
                if cell:
                    grid.add_row(Text(heading), Text(cell))
        return grid


def _width_needed(heading: str) -> int:
    """The width of the longest word. A heading of up to four columns is not broken at all."""
    return max([min(4, cell_len(heading)), *map(cell_len, heading.split())])

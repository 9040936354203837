"""Draws ``docs/architecture.svg`` and ``docs/overview.svg`` from the ``.toml`` files beside them,
without a drawing library.

python scripts/draw_architecture.py
"""

from __future__ import annotations

import textwrap
import tomllib
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = ("architecture", "overview")

WIDTH, MARGIN, GAP = 1180, 20, 14
COLUMN_GAP = 110
"""The gap between the two processes, which is crossed by plans and reports."""
FRAME_HEAD, BOX_HEAD, LINE, ROW_GAP = 34, 21, 14, 22
CHARACTER = 6.1  # width of a character in the small font
BLUE, GREEN, YELLOW, GREY = "#e8f0fb", "#e9f6ec", "#fdf3e1", "#f1f1f1"
COLOURS = {"offload": BLUE, "kvtiers'": BLUE, "tiers": GREEN, "CPU": GREEN, "disk": GREEN,
           "policies": YELLOW}  # fmt: skip
"""The colour of a box, by its first word. All other boxes are grey."""


class Box(NamedTuple):
    names: str
    lines: list[str]
    left: float
    top: float
    width: float
    height: float


def wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(8, int((width - 12) / CHARACTER)), break_on_hyphens=False)


def place_row(row: list[list[str]], left: float, top: float, width: float) -> list[Box]:
    """The boxes of one row, with equal widths and heights."""
    each = (width - GAP * (len(row) - 1)) / len(row)
    texts = [(wrapped(names, each), wrapped(text, each)) for names, text in row]
    height = max(BOX_HEAD + LINE * (len(head) - 1 + len(text)) + 8 for head, text in texts)
    return [
        Box(names, [*head, "", *text], left + at * (each + GAP), top, each, height)
        for at, ((names, _), (head, text)) in enumerate(zip(row, texts, strict=True))
    ]


def draw_box(box: Box) -> list[str]:
    colour = COLOURS.get(box.names.split()[0].partition(".")[0], GREY)
    drawn = [
        f'<rect x="{box.left:.0f}" y="{box.top:.0f}" width="{box.width:.0f}" '
        f'height="{box.height:.0f}" rx="4" fill="{colour}" stroke="#555"/>'
    ]
    head, _, text = "\n".join(box.lines).partition("\n\n")
    names = head.split("\n")
    for at, line in enumerate([*names, *text.split("\n")]):
        style = ' class="name"' if at < len(names) else ""
        y = box.top + 16 + at * LINE
        drawn.append(f'<text x="{box.left + 7:.0f}" y="{y:.0f}"{style}>{escape(line)}</text>')
    return drawn


def draw_frame(
    frame: dict[str, Any], left: float, top: float, width: float
) -> tuple[list[str], list[Box]]:
    """Draw a frame and its boxes. The last box ends at the frame's end."""
    boxes = list[Box]()
    y = top + FRAME_HEAD
    for row in frame["rows"]:
        placed = place_row(row, left + 12, y, width - 24)
        boxes += placed
        y += placed[0].height + ROW_GAP
    height = y - ROW_GAP + 12 - top
    drawn = [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8" '
        'fill="none" stroke="#888" stroke-dasharray="5 3"/>',
        f'<text x="{left + 12:.0f}" y="{top + 21:.0f}" class="frame">'
        f"{escape(frame['name'])}</text>",
    ]
    return drawn, boxes


def draw_arrow(start: Box, end: Box, label: str, shift: float, at: float | None) -> list[str]:
    """Draw an arrow straight up or down between rows, or across between the processes with its
    label above. ``at`` is where the arrow begins, as a share of its box's width, so that it crosses
    no other box."""
    if abs(start.top - end.top) < 1:
        right = start.left < end.left
        x1 = start.left + start.width if right else start.left
        x2 = end.left if right else end.left + end.width
        y1 = y2 = start.top + 20 + shift
    else:
        is_down = start.top < end.top
        y1 = start.top + start.height if is_down else start.top
        y2 = end.top if is_down else end.top + end.height
        left = max(start.left, end.left)
        right_end = min(start.left + start.width, end.left + end.width)
        x1 = x2 = (left + right_end) / 2 if at is None else start.left + at * start.width
    drawn = [
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" '
        'stroke="#333" stroke-width="1.4" marker-end="url(#tip)"/>'
    ]
    if label:
        middle = (x1 + x2) / 2
        drawn.append(
            f'<text x="{middle:.0f}" y="{y1 - 5:.0f}" text-anchor="middle">{escape(label)}</text>'
        )
    return drawn


def draw(source: dict[str, Any]) -> str:
    width = source.get("width", WIDTH)
    column = (width - 2 * MARGIN - COLUMN_GAP) / 2
    lefts = (MARGIN, MARGIN + column + COLUMN_GAP, MARGIN)
    widths = (column, column, width - 2 * MARGIN)
    tops = [48.0, 48.0]
    drawn, boxes = list[str](), dict[str, Box]()
    for frame in source["frames"]:
        at = frame["column"]
        top = max(tops) if at == 2 else tops[at]
        lines, placed = draw_frame(frame, lefts[at], top, widths[at])
        drawn += lines
        for box in placed:
            drawn += draw_box(box)
            boxes[box.names] = box
        bottom = placed[-1].top + placed[-1].height + 12 + 16
        tops = [bottom, bottom] if at == 2 else [*tops[:at], bottom, *tops[at + 1 :]]
    for number, arrow in enumerate(source["arrows"]):
        label = arrow.get("label", "")
        start, end = boxes[arrow["from"]], boxes[arrow["to"]]
        drawn += draw_arrow(start, end, label, 26 * (number % 2), arrow.get("at"))
    height = max(tops)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
            f'width="{width}" height="{height:.0f}" role="img">',
            f"<title>{escape(source['title'])}</title>",
            "<style>text{font:11px sans-serif;fill:#222}.name{font-weight:bold}"
            ".frame{font-size:13px;font-weight:bold}.title{font-size:17px;font-weight:bold}</style>",
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="8" refY="4" '
            'orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="#333"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="{MARGIN}" y="30" class="title">{escape(source["title"])}</text>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((DOCS / f"{name}.toml").read_text(encoding="utf-8"))


def main() -> None:
    for name in NAMES:
        (DOCS / f"{name}.svg").write_text(draw(read(name)), encoding="utf-8")


if __name__ == "__main__":
    main()

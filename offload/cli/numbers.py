"""Formats numbers for all commands: sizes, shares, counts, rates and ages.

Sizes have three significant digits, shares one decimal, and whole numbers thousands separators. An
unknown value is printed as a dash.
"""

from __future__ import annotations

import time

from offload.sizes import rounded_size

UNKNOWN = "-"
_AGES = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60}


def size_text(size_bytes: float | None) -> str:
    """A size with three significant digits: ``1.13GiB``, ``390KiB``."""
    return UNKNOWN if size_bytes is None else rounded_size(size_bytes)


def speed_text(bytes_per_s: float | None) -> str:
    """Bytes per second."""
    return UNKNOWN if bytes_per_s is None else f"{size_text(bytes_per_s)}/s"


def share_text(ratio: float | None) -> str:
    """A ratio as percent."""
    return UNKNOWN if ratio is None else f"{ratio:,.1%}"


def count_text(count: float | None) -> str:
    """A whole number, or a small rate with one decimal."""
    if count is None:
        return UNKNOWN
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def age_text(at_ns: int, now_s: float | None = None) -> str:
    """The age of a time stamp, ``?`` if it is unknown."""
    if at_ns <= 0:
        return "?"
    return duration_text(max(0.0, (now_s or time.time()) - at_ns / 1e9))


def duration_text(seconds: float) -> str:
    """A duration in the largest unit that gives at least two: ``90m``, ``3d``."""
    for unit, length in _AGES.items():
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"

"""Declares types and ranges of a policy's options, and checks the options that a user configures.

A constructor declares type and range in the option's annotation:

    def __init__(self, protected_share: Annotated[float, Range(0, 1)] = 0.8) -> None: ...

The check covers the annotation's type (``int``, ``float``, ``bool`` or ``str``; the constructor
must check other types) and the range, if one is declared.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The bounds of an option: from ``low`` (or above ``above``) to ``high``."""

    low: float
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        """Return True if a value lies within the bounds."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        least = f"above {self.low:,}" if self.above else f"of at least {self.low:,}"
        return least if math.isinf(self.high) else f"{least} and at most {self.high:,}"


class InvalidOption(NamedTuple):
    """An option with a bad value: its name, and what is wrong."""

    name: str
    what: str


_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


def invalid_options(made: type, options: Mapping[str, Any]) -> list[InvalidOption]:
    """Check options against a class's constructor. Return a list of all problems."""
    hints = _hints_of(made)
    found = []
    for name, value in options.items():
        kind, limits = hints.get(name, (None, None))
        if kind is None:
            continue
        expected = _NAMES[kind] + (f" {limits}" if limits else "")
        if not _is_of(kind, value) or (limits is not None and not limits.holds(value)):
            found.append(InvalidOption(name, f"must be {expected} (got {_show(value)})"))
    return found


def _hints_of(made: type) -> dict[str, tuple[type, Range | None]]:
    """Return the types and ranges that the constructor declares and that can be checked."""
    try:
        hints = typing.get_type_hints(made.__init__, include_extras=True)  # type: ignore[misc]  # the class is only asked
    except Exception:  # annotations may be missing, or name types that do not exist at run time
        return {}
    found: dict[str, tuple[type, Range | None]] = {}
    for name, hint in hints.items():
        kind, *extras = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if name != "return" and kind in _NAMES:
            found[name] = kind, next((one for one in extras if isinstance(one, Range)), None)
    return found


def _is_of(kind: type, value: object) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind is int:
        return isinstance(value, int)
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number larger than any float
        return False


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Sizes in bytes as people write them: ``8GiB``, ``1.5TB``, ``4096``.

Both families of units are understood, binary (``KiB`` = 1,024) and decimal (``KB`` = 1,000), in any
case and with or without a space. A bare letter (``8G``) is refused, because the two readings differ
by 7 % and a memory limit must not be guessed.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
SIZE_MAX = 1 << 60
"""1 EiB: more than any machine has, and small enough for all signed 64-bit fields."""
DAY_S = 86_400.0
"""Seconds of a day: a budget of writes is given in bytes per day."""

_PREFIXES = "KMGTPE"
_UNITS = {"b": 1}
for _power, _prefix in enumerate(_PREFIXES, start=1):
    _UNITS[f"{_prefix}iB".lower()] = 1024**_power
    _UNITS[f"{_prefix}B".lower()] = 1000**_power

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(value: object) -> int:
    """Bytes from an integer or a text such as ``"8GiB"``; a fraction of a byte is discarded.

    Raises ``ValueError`` whose text describes the problem and, after the first period, the remedy.
    Zero is allowed; the caller checks whether it makes sense.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        size = _from_text(value)
    else:
        raise ValueError('is not a size. Use an integer (bytes) or a string such as "8GiB"')
    if size < 0:
        raise ValueError("is negative. Give a positive size")
    if size > SIZE_MAX:
        raise ValueError("is larger than 1EiB. Check the number and its unit")
    return size


def format_size(size: int) -> str:
    """Return a short text for a size that the user has given or may give in a configuration.

    It is exact if two decimals or the next smaller unit allow that (``8GiB``, ``5.75GiB``,
    ``1537MiB``), else it has three significant digits, or the digits of a whole number. It is never
    rounded up, so that a limit quoted in a hint is a valid value.
    """
    if size < KIB:
        return f"{size}B"
    power = max(p for p in range(1, len(_PREFIXES) + 1) if size >= 1024**p)
    hundredths, rest = divmod(size * 100, 1024**power)
    if rest and power > 1 and size % 1024 ** (power - 1) == 0:
        return f"{size // 1024 ** (power - 1)}{_PREFIXES[power - 2]}iB"
    whole, decimals = hundredths // 100, f"{hundredths % 100:02d}"
    if rest:
        decimals = decimals[: 2 if whole < 10 else 1 if whole < 100 else 0]
    else:
        decimals = decimals.rstrip("0")
    return f"{whole}{'.' if decimals else ''}{decimals}{_PREFIXES[power - 1]}iB"


def rounded_size(size: float) -> str:
    """Return a size for reading, with three significant digits: ``1.13GiB``, ``390KiB``; without
    decimals if it is a whole number of its unit. ``format_size`` is for values to be typed."""
    value, unit = float(size), 0
    while abs(value) >= (999.5 if unit else 1024) and unit < len(_PREFIXES):
        value /= 1024
        unit += 1
    name = f"{_PREFIXES[unit - 1]}iB" if unit else "B"
    if value == int(value):
        return f"{value:.0f}{name}"
    decimals = 3 if abs(value) < 0.9995 else 2 if abs(value) < 9.995 else abs(value) < 99.95
    return f"{value:.{int(decimals)}f}{name}"


def _from_text(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None and _SIZE.fullmatch(text.strip().removeprefix("-")):
        raise ValueError("is negative. Give a positive size")
    if match is None:
        raise ValueError('is not a size. Use an integer (bytes) or a string such as "8GiB"')
    number, unit = match.groups()
    if len(unit) == 1 and unit.upper() in _PREFIXES:
        letter = unit.upper()
        raise ValueError(
            f'has an ambiguous unit. Write "{number}{letter}iB" (powers of 1,024) '
            f'or "{number}{letter}B" (powers of 1,000)'
        )
    scale = _UNITS.get(unit.lower() or "b")
    if scale is None:
        raise ValueError("has an unknown unit. Use KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    return int(Fraction(number) * scale)

"""Every command prints numbers in the same way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offload.cli import numbers
from tests.offload.cli.rank_folders import ROOT, kvtiers

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (KIB, "1KiB"),
        (1536, "1.50KiB"),
        (123_456_789, "118MiB"),
        (12.3 * GIB, "12.3GiB"),
        (999.4 * GIB, "999GiB"),
        (1020 * MIB, "0.996GiB"),
        (99.96 * KIB, "100KiB"),
        (200 * GIB, "200GiB"),
        (1 << 60, "1EiB"),
        (None, "-"),
    ],
)
def test_sizes_have_three_significant_digits(size: float | None, text: str) -> None:
    assert numbers.size_text(size) == text


def test_shares_and_counts() -> None:
    assert numbers.share_text(0.123456) == "12.3%"
    assert numbers.share_text(32.39) == "3,239.0%"
    assert numbers.count_text(1_234_567) == "1,234,567"
    assert numbers.count_text(1.25) == "1.2"
    assert numbers.duration_text(7300) == "2h"
    assert numbers.share_text(None) == numbers.count_text(None) == numbers.speed_text(None) == "-"


def test_no_command_formats_shares_or_sizes_in_another_way() -> None:
    """Percentages and sizes must come from ``offload.cli.numbers``."""
    own = re.compile(r":[,.\d]*%}|format_size")
    files = [path for path in (ROOT / "offload/cli").glob("*.py") if path.name != "numbers.py"]
    assert len(files) > 10
    assert [path.name for path in files if own.search(Path(path).read_text())] == []


VALUES = re.compile(
    r"capacity|bytes_(min|max)|CPU_CAPACITY_(MIN|MAX)|(tier|config|config\.cpu)\.capacity|top\[name\]"
)
"""Arguments that ``format_size`` may have: values that a user has typed or may type."""


def inexact_values(text: str) -> list[str]:
    """Find the arguments of ``format_size`` in a module that nobody would type."""
    found = re.findall(r"format_size\(([^()]+)\)|map\((format_size)", text)
    return [value for pair in found for value in pair if value and not VALUES.fullmatch(value)]


def test_only_what_a_user_types_is_printed_as_an_exact_size() -> None:
    files = [path for path in (ROOT / "offload").rglob("*.py") if path.name != "sizes.py"]
    wrong = {path.name: found for path in files if (found := inexact_values(path.read_text()))}
    assert wrong == {}
    assert inexact_values("format_size(limit.limit_bytes)") == ["limit.limit_bytes"]
    assert inexact_values("map(format_size, pages)") == ["format_size"]
    assert inexact_values("format_size(tier.capacity)") == []


def test_tables_that_can_be_too_wide_for_a_terminal_adapt_to_it() -> None:
    """``rich.table`` breaks words and numbers there; ``top`` prints blocks."""
    files = [path for path in (ROOT / "offload/cli").glob("*.py") if path.name != "top.py"]
    assert [path.name for path in files if "rich.table" in path.read_text()] == []


def test_the_version() -> None:
    found = kvtiers("--version")
    assert found.code == 0
    assert re.fullmatch(r"kvtiers \d+\.\d+\.\d+ \(.+, Python 3\.\d+\.\d+\)\n", found.out)

"""Sizes as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.sizes import SIZE_MAX, format_size, parse_size

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "GB": 10**9}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("1.5TB", 15 * 10**11),
        (" 8 gib ", 8 * 2**30),
        ("0.1KiB", 102),
        ("1EiB", SIZE_MAX),
    ],
)
def test_sizes_are_parsed(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "forty", "-1GiB", "8G", "8 G", "1e9", "8GiBs", "GiB", "1,5GiB", "8  GiB", "0x10", "٣GiB",
     True, None, 1.5, [], {}, -1, SIZE_MAX + 1, "2EiB", "9" * 40, "1_000"],
)  # fmt: skip
def test_invalid_sizes_are_refused_with_a_hint(text: object) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) .*\. [A-Z]"):
        parse_size(text)


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_text_means_its_number_times_its_unit(whole: int, thousandths: int, unit: str) -> None:
    expected = (whole * 1000 + thousandths) * UNITS[unit] // 1000
    text = f"{whole}.{thousandths:03d}{unit}"
    if expected <= SIZE_MAX:
        assert parse_size(text) == expected


@given(st.integers(0, SIZE_MAX))
def test_a_shown_size_is_never_larger_and_hardly_smaller(size: int) -> None:
    shown = format_size(size)
    assert re.fullmatch(r"[0-9]+(\.[0-9]{1,2})?([KMGTPE]i)?B", shown)
    assert parse_size(shown) <= size
    assert size - parse_size(shown) <= size / 100


@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_round_sizes_are_shown_exactly(number: int, unit: str) -> None:
    assert format_size(number * UNITS[unit]) == f"{number}{unit}"


def test_sizes_between_units_are_exact_where_a_short_text_can_be() -> None:
    assert format_size(5888 * 2**20) == "5.75GiB"
    assert format_size(1537 * 2**20) == "1537MiB"


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (123456789, "117MiB"),
        (12345678, "11.7MiB"),
        (8 * 2**30 + 1, "8.00GiB"),
        (1234567, "1.17MiB"),
        (1023 * 2**30 + 1, "1023GiB"),
    ],
)
def test_other_sizes_have_three_digits_and_are_not_rounded_up(size: int, shown: str) -> None:
    assert format_size(size) == shown

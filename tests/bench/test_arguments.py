"""Wrong options of the benchmarks are refused before anything is measured."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.__main__ import build


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("tiers --rounds 0", "greater than or equal to 1 (got 0)"),
        ("tiers --sizes 64KiB,foo", "--sizes: 'foo': is not a size"),
        ("tiers --total -4", "--total: '-4': must be at least 1"),
        ("tiers --total 1MiB,2MiB", "--total: '1MiB,2MiB' is more than one size"),
        ("tiers --systems raw,foo", "--systems: unknown: foo; known: raw, lmdb"),
        ("tiers --depths 0", "--depths: '0': must be a whole number of at least 1"),
        ("tiers --folder /nowhere/kv", "there is no folder /nowhere/kv"),
        ("copy --rounds 0", "greater than or equal to 1 (got 0)"),
        ("copy --layouts foo", "--layouts: unknown: foo; known: separate, contiguous, mla"),
        ("copy --device gpu", "--device: 'gpu' is neither cpu nor cuda"),
        ("churn --cap 0", "greater than or equal to 2 (got 0)"),
        ("churn --systems foo", "--systems: unknown: foo; known: raw, lmdb"),
        ("restart --records 0", "greater than or equal to 1 (got 0)"),
        ("shared --depth 0", "greater than or equal to 1 (got 0)"),
        ("hooks --policy lruu", 'unknown policy "lruu". Did you mean "lru"?'),
        ("policies --policy lruu", 'unknown policy "lruu". Did you mean "lru"?'),
        ("policies /nowhere/trace", "'/nowhere/trace' does not exist"),
        (f"gates {__file__} --part x", 'part "x" must be like 0.5:1'),
        ("serve --sizes abc", "--sizes: 'abc': must be a whole number of at least 1"),
        ("serve --hits 2", "--hits: '2': must be from 0 to 1"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(command: str, expected: str) -> None:
    result = CliRunner().invoke(build(), command.split())
    assert result.exit_code == 2, result.exception
    assert expected in " ".join(result.output.replace("│", " ").split())

"""Does a report of ``bench copy`` on a GPU meet the targets? Prints the shares and names what fell
short: ``python -m bench.copy_targets copy-cuda.json`` ends with 1 if anything did.

Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TARGETS = {"contiguous": 0.95, "separate": 0.90}
"""Least share of one large copy, in each direction, for chunks of 1 MiB and more: of the separate
layout these are 32 pages of 32 KiB and more."""


def shares(report: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Case, series, GB/s and share of everything that is ours."""
    for row in report["rows"]:
        values = row["values"]
        if row["series"].startswith("kvtiers") and values.get("share") is not None:
            yield row["case"], row["series"], values["GB/s"], values["share"]


def missed(report: Mapping[str, Any]) -> list[str]:
    """The cases that fell short of their target, in words."""
    short = []
    for case, _, _, share in shares(report):
        layout, size, direction = case.split(", ")
        target = TARGETS.get(layout, 0.0) if size.endswith(" MiB") and direction != "both" else 0.0
        if share < target:
            short.append(f"{case}: {share:.3f} of the large copy, not {target}")
    return short


def untried(report: Mapping[str, Any]) -> list[str]:
    """The targets about which the report says nothing, in words."""
    cases = [case.split(", ") for case, *_ in shares(report)]
    tried = {(layout, way) for layout, size, way in cases if size.endswith(" MiB")}
    wanted = [(layout, way) for layout in TARGETS for way in ("store", "load")]
    return [
        f"{layout}, {way}: not measured" for layout, way in wanted if (layout, way) not in tried
    ]


def main(path: str) -> int:
    """Print and return the exit status. A target that was not measured is not met."""
    report = json.loads(Path(path).read_text())
    found = list(shares(report))
    for case, series, rate, share in found:
        print(f"{case:32} {series:20} {rate:7.1f} GB/s {share:.3f}")
    short = missed(report) + untried(report)
    print("\n".join(short) or "every target is met")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

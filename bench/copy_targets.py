"""Checks whether a report of ``bench copy`` on a GPU meets the targets.

``python -m bench.copy_targets copy-cuda.json`` prints the shares, names missed targets, and exits
with 1 if there are any. Needs only the standard library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TARGETS = {"contiguous": (1, 0.95), "separate": (2, 0.90)}
"""By layout, the smallest chunks in MiB that have a target, and their minimum share of one large
copy in each direction. 2 MiB of the separate layout are 32 pages of 64 KiB. At 32 KiB, submitting a
descriptor takes about as long as copying its bytes, so there is no target."""


def shares(report: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Case, series, GB/s and share of each row that measures kvtiers."""
    for row in report["rows"]:
        values = row["values"]
        if row["series"].startswith("kvtiers") and values.get("share") is not None:
            yield row["case"], row["series"], values["GB/s"], values["share"]


def target_of(case: str) -> float:
    """The minimum share of a case; 0 if it has none."""
    layout, size, direction = case.split(", ")
    number, unit = size.split(" ")
    smallest, target = TARGETS.get(layout, (0, 0.0))
    has_one = direction != "both" and unit == "MiB" and int(number) >= smallest
    return target if has_one else 0.0


def missed(report: Mapping[str, Any]) -> list[str]:
    """The cases that missed their target, in words."""
    short = []
    for case, _, _, share in shares(report):
        target = target_of(case)
        if share < target:
            short.append(f"{case}: {share:.3f} of the large copy, not {target}")
    return short


def untried(report: Mapping[str, Any]) -> list[str]:
    """The targets for which the report has no measurement, in words."""
    cases = [case.split(", ") for case, *_ in shares(report) if target_of(case)]
    tried = {(layout, way) for layout, _, way in cases}
    wanted = [(layout, way) for layout in TARGETS for way in ("store", "load")]
    return [
        f"{layout}, {way}: not measured" for layout, way in wanted if (layout, way) not in tried
    ]


def main(path: str) -> int:
    """Print the result and return the exit status. A target that was not measured is not met."""
    report = json.loads(Path(path).read_text())
    found = list(shares(report))
    for case, series, rate, share in found:
        print(f"{case:32} {series:20} {rate:7.1f} GB/s {share:.3f}")
    short = missed(report) + untried(report)
    print("\n".join(short) or "every target is met")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

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
"""By layout, the size in MiB of the smallest chunks with a target, and their minimum share of the
rate of one large copy in each direction. A chunk of 2 MiB in the separate layout has 32 pages of 64
KiB. For pages of 32 KiB there is no target, because submitting a descriptor takes about as long as
copying its bytes."""


def shares(report: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """The case, series, GB/s and share of each row about kvtiers."""
    for row in report["rows"]:
        values = row["values"]
        if row["series"].startswith("kvtiers") and values.get("share") is not None:
            yield row["case"], row["series"], values["GB/s"], values["share"]


def target_of(case: str) -> float:
    """The minimum share of a case, or 0 if it has no target."""
    layout, size, direction = case.split(", ")
    number, unit = size.split(" ")
    smallest, target = TARGETS.get(layout, (0, 0.0))
    has_one = direction != "both" and unit == "MiB" and int(number) >= smallest
    return target if has_one else 0.0


def missed(report: Mapping[str, Any]) -> list[str]:
    """Messages about the cases that missed their target."""
    short = []
    for case, _, _, share in shares(report):
        target = target_of(case)
        if share < target:
            short.append(f"{case}: {share:.3f} of the large copy, not {target}")
    return short


def untried(report: Mapping[str, Any]) -> list[str]:
    """Messages about targets for which the report has no measurement."""
    cases = [case.split(", ") for case, *_ in shares(report) if target_of(case)]
    tried = {(layout, way) for layout, _, way in cases}
    wanted = [(layout, way) for layout in TARGETS for way in ("store", "load")]
    return [
        f"{layout}, {way}: not measured" for layout, way in wanted if (layout, way) not in tried
    ]


def main(path: str) -> int:
    """Print the result and return the exit status. A target without a measurement counts as
    missed."""
    report = json.loads(Path(path).read_text())
    found = list(shares(report))
    for case, series, rate, share in found:
        print(f"{case:32} {series:20} {rate:7.1f} GB/s {share:.3f}")
    short = missed(report) + untried(report)
    print("\n".join(short) or "every target is met")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

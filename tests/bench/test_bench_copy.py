"""The copy benchmark at a tiny size, so that it keeps working."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from bench import copy, copy_beds
from bench.copy_beds import LAYOUTS, MLA_LAYERS, MLA_PAGE_BYTES, layout
from bench.copy_targets import main, missed, shares, untried
from tests.patience import PATIENCE_S


def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "LARGE_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(copy_beds, "LARGE_COPY_BYTES", 1 << 20)
    mla = MLA_LAYERS * MLA_PAGE_BYTES
    config = copy.Config(
        chunk_bytes=(1 << 16, mla), job_bytes=4 << 20, cache_bytes=8 << 20, rounds=1
    )
    report = copy.run(config, Progress(disable=True))
    cases = {row.case.rsplit(", ", 1)[0] for row in report.rows}
    assert len(cases) == 5, cases  # three layouts, the large size in all of them
    assert len(report.rows) == 5 * 3 * 3  # directions; two engines and the limit
    for row in report.rows:
        assert row.values["GB/s"] > 0
        if row.series != copy.LIMIT:
            assert row.values["share"] > 0
            assert math.isnan(row.values.get("products", math.nan))


def test_standard_output_contains_only_json(tmp_path: Path) -> None:
    """The benchmark runs here as ``scripts/gpu_box`` calls it, without vLLM and other dependencies
    of the core."""
    absent = ["vllm", "msgspec", "lmdb", "hypothesis", "pytest_asyncio", "matplotlib"]
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {absent}:\n    sys.modules[name] = None\n"
    )
    root = Path(__file__).parents[2]
    options = "--layouts contiguous --sizes 1MiB --rounds 1 --job 4MiB --cache 16MiB --json"
    run = subprocess.run(
        [sys.executable, "-m", "bench.copy", *options.split()],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    found = list(shares(json.loads(run.stdout)))
    assert [case for case, *_ in found] == [
        f"contiguous, 1 MiB, {direction}" for direction in copy.DIRECTIONS
    ]


def report(**found: float) -> dict[str, Any]:
    rows = [
        {"case": case, "series": "kvtiers (batch)", "values": {"GB/s": 50.0, "share": share}}
        for case, share in found.items()
    ]
    limit = {"case": "contiguous, 1 MiB, store", "series": copy.LIMIT, "values": {"GB/s": 55.0}}
    return {"rows": [*rows, limit]}


def test_the_targets_are_for_large_chunks_in_one_direction(tmp_path: Path) -> None:
    good = {
        "contiguous, 1 MiB, store": 0.95,
        "contiguous, 512 KiB, load": 0.5,
        "separate, 16 MiB, load": 0.90,
        "separate, 64 KiB, load": 0.2,
        "separate, 1 MiB, both": 0.6,
        "mla, 15372 KiB, store": 0.3,
    }
    assert missed(report(**good)) == []
    assert missed(report(**{"separate, 1 MiB, store": 0.5})) == [], "pages of 32 KiB"
    bad = {"contiguous, 2 MiB, load": 0.949, "separate, 2 MiB, store": 0.899}
    assert missed(report(**good, **bad)) == [
        "contiguous, 2 MiB, load: 0.949 of the large copy, not 0.95",
        "separate, 2 MiB, store: 0.899 of the large copy, not 0.9",
    ]
    assert untried(report(**good)) == [
        "contiguous, load: not measured",
        "separate, store: not measured",
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(**good)))
    assert main(str(path)) == 1
    path.write_text(json.dumps(report(**good, **dict.fromkeys(bad, 0.95))))
    assert main(str(path)) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_describe_each_byte_of_the_cache_once(name: str) -> None:
    one = layout(name, 2 * MLA_LAYERS * MLA_PAGE_BYTES // 32 * 32)
    assert one is not None
    regions = one.regions(0, 4 * one.chunk_blocks).regions
    starts = sorted(
        region.address + block * region.block_stride
        for region in regions
        for block in range(4 * one.chunk_blocks)
    )
    assert starts == [i * one.page_bytes for i in range(len(starts))]
    assert one.chunk_bytes * 4 == len(starts) * one.page_bytes

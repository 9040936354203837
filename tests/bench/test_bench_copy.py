"""The copy benchmark at toy size, so that it cannot rot."""

from __future__ import annotations

import math

import pytest
from rich.progress import Progress

from bench import copy, copy_beds
from bench.copy_beds import LAYOUTS, MLA_LAYERS, MLA_PAGE_BYTES, layout


def test_it_measures_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
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

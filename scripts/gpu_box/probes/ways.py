"""Runs the measurement of the engine's start for pages of several sizes, and reports its
choices."""

from __future__ import annotations

import os
from typing import Any

from common import device, result

from tiers.copy.base import GroupRegions, PageRegion
from tiers.copy.cuda_engine import CudaCopyEngine
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

LAYERS = 32
BLOCKS = 256
KIB = (2, 4, 8, 16, 28, 32, 64) if "PROBE_SMALL" not in os.environ else (2, 64)


def main() -> None:
    found: dict[str, Any] = {}
    with device() as driver:
        for kib in KIB:
            page = kib * 1024
            memory = driver.allocate(LAYERS * BLOCKS * page)
            regions = tuple(
                PageRegion(f"{i}", memory + i * BLOCKS * page, page, page) for i in range(LAYERS)
            )
            group = GroupRegions(0, 1, regions)
            registrar = CudaRegistrar(0, driver)
            slots = max(1, (32 << 20) // group.chunk_bytes)
            slab = HostSlab(
                group.chunk_bytes, slots, pin=True, registrar=registrar, background=False
            )
            engine = CudaCopyEngine(
                [group],
                slab,
                device=0,
                num_blocks=BLOCKS,
                driver=driver,
                compute_stream=lambda: 0,
            )
            for way in engine.path_infos():
                rate = way.bytes_per_second
                found[f"{kib} KiB, {way.direction}, {way.name}"] = {
                    "GB/s": round(rate / 1e9, 2) if rate else None,
                    "used": way.is_used,
                }
            result(found)
            engine.close()
            slab.close()
            driver.free(memory)


if __name__ == "__main__":
    main()

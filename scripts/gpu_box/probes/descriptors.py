"""Measures batches of several sizes: seconds to submit and to copy 131,072 pages of 4 KiB."""

from __future__ import annotations

import sys
import time

import numpy as np
from common import device, result

from tiers import cuda_driver
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

PAGE = 4096


def main(per_call: int, copies: int = 131_072) -> None:
    cuda_driver.BATCH_COPIES_MAX = per_call  # type: ignore[misc]  # the bound of the product
    with device() as driver:
        memory = driver.allocate(copies * PAGE)
        registrar = CudaRegistrar(0, driver)
        slab = HostSlab(PAGE, copies, pin=True, registrar=registrar, background=False)
        stream = driver.create_stream()
        order = np.random.default_rng(0).permutation(copies).astype(np.int64)
        blocks, slots = memory + order * PAGE, slab.address + np.arange(copies) * PAGE
        sizes = np.full(copies, PAGE, dtype=np.int64)
        found = {"copies per call": per_call, "copies": copies}
        for name, to, source in (("store", slots, blocks), ("load", blocks, slots)):
            for _ in range(3):
                began = time.perf_counter()
                driver.copy_batch(to, source, sizes, stream)
                submitted = time.perf_counter()
                driver.synchronize_stream(stream)
                ended = time.perf_counter()
            found |= {
                f"{name}, submission us per copy": round((submitted - began) / copies * 1e6, 3),
                f"{name}, GB/s": round(copies * PAGE / (ended - began) / 1e9, 2),
            }
            result(found)
        driver.destroy_stream(stream)
        slab.close()
        driver.free(memory)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Registers host memory in pieces of several sizes while another thread submits small copies, to
measure how long registration delays the calls of the model's thread."""

from __future__ import annotations

import sys
import threading
import time

from common import device, result

from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

MIB = 2**20
BEATS_ALONE = 200


def beats(stop: threading.Event, waits: list[float]) -> None:
    """Submit a tiny copy again and again, and record how long each takes."""
    with device() as driver:
        memory = driver.allocate(4096)
        registrar = CudaRegistrar(0, driver)
        slab = HostSlab(4096, 1, pin=True, registrar=registrar, background=False)
        stream = driver.create_stream()
        while not stop.is_set():
            began = time.perf_counter()
            driver.copy_one(memory, slab.address, 4096, stream)
            driver.synchronize_stream(stream)
            waits.append(time.perf_counter() - began)
            time.sleep(0.0005)
        driver.destroy_stream(stream)
        slab.close()
        driver.free(memory)


def milliseconds(waits: list[float], number: int) -> float | None:
    """The wait at this position of the sorted list; ``None`` if no copy ended in that time."""
    return round(1e3 * waits[number], 3) if waits else None


def main(total_mib: int = 4096) -> None:
    found = {}
    for piece_mib in (8, 64, 4, 256):
        for background in (False, True):
            waits: list[float] = []
            stop = threading.Event()
            thread = threading.Thread(target=beats, args=(stop, waits))
            thread.start()
            while len(waits) < BEATS_ALONE:
                time.sleep(0.001)
            before = sorted(waits)
            waits.clear()
            began = time.perf_counter()
            slab = HostSlab(
                4 * MIB,
                max(1, total_mib // 4),
                pin=True,
                registrar=CudaRegistrar(0),
                piece_bytes=piece_mib * MIB,
                background=background,
            )
            slab.wait_ready()
            seconds = time.perf_counter() - began
            stop.set()
            thread.join()
            slab.close()
            after = sorted(waits)
            found[f"{piece_mib} MiB, {'with' if background else 'without'} pauses"] = {
                "GB/s": round(total_mib * MIB / seconds / 1e9, 2),
                "beat alone, median ms": milliseconds(before, len(before) // 2),
                "beat, median ms": milliseconds(after, len(after) // 2),
                "beat, worst ms": milliseconds(after, -1),
            }
            result(found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Collects facts about the machine that affect copies."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import subprocess
import tempfile

from common import device, result

from tiers.copy.cuda_engine import gpu_node
from tiers.slab.host_memory import available_bytes

GIB = 2**30


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError as error:
        gpu = f"no nvidia-smi: {error}"
    disk = shutil.disk_usage(tempfile.gettempdir())
    with device() as driver:
        handle = driver.device(0)
        facts = {
            "host pointers (attribute 91)": driver.can_use_host_pointers(handle),
            "batched call": driver.has_batch_copy,
            "bus": driver.pci_bus_id(handle),
        }
    result(
        {
            "gpu": gpu,
            **facts,
            "numa node": gpu_node(0),
            "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
            "page bytes": mmap.PAGESIZE,
            "free memory, GiB": round((available_bytes() or 0) / GIB, 1),
            "free in the folder of temporary files, GiB": round(disk.free / GIB, 1),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "triton", "transformers", "vllm")},
        }
    )


if __name__ == "__main__":
    main()

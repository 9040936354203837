"""Collects facts about the machine that affect copies."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import subprocess

from common import device, result

from tiers.copy.cuda_engine import gpu_node


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
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "triton", "transformers", "vllm")},
        }
    )


if __name__ == "__main__":
    main()

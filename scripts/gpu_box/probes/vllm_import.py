"""Unpacks the carried vLLM and imports its GPU runner, in a separate probe so that the serving
probes do not have to.

``pack.py`` leaves ``carry-N.tar.xz`` files; they may arrive one after the other. Everything is
unpacked into the folder that $GPU_BOX_SITE names (default: ``.gpu_box/site``), which the serving
probes put on their path. If vLLM is installed, there is nothing to unpack.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tarfile
import time
from pathlib import Path

from common import result
from site_path import SITE, use_site

CARRIES = Path(__file__).resolve().parents[3] / ".gpu_box"
MODULES = (
    "vllm._C_stable_libtorch",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "offload.connector",
)


def main() -> None:
    times: dict[str, float | str] = {}
    if importlib.util.find_spec("vllm") is None:
        SITE.mkdir(parents=True, exist_ok=True)
        for carry in sorted(CARRIES.glob("carry-*.tar.xz")):
            done = SITE / f".{carry.name}.done"
            if done.exists():
                continue
            began = time.monotonic()
            with tarfile.open(carry) as archive:
                archive.extractall(SITE, filter="data")
            done.touch()
            times[f"unpack {carry.name}"] = round(time.monotonic() - began, 1)
        use_site()
    for name in MODULES:
        began = time.monotonic()
        try:
            importlib.import_module(name)
            times[f"import {name}"] = round(time.monotonic() - began, 1)
        except Exception as error:  # the probe reports whatever an import raises
            times[f"import {name}"] = f"{type(error).__name__}: {error}"
        result(times)
    failed = [name for name, value in times.items() if isinstance(value, str)]
    if failed:
        sys.exit(f"not imported: {failed}")


if __name__ == "__main__":
    main()

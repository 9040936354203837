"""Unpacks the carried vLLM and imports everything that serving needs, in a separate probe so that
the serving probes do not have to.

``pack.py`` writes ``carry-N.zip`` files, which may arrive one after the other. They are unpacked
into the folder $GPU_BOX_SITE, by default one outside the checkout, which the serving probes put on
their path. If vLLM is installed, nothing is unpacked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
import zipfile
from pathlib import Path

from common import result
from site_path import SITE, use_site

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contents import FACTS, NOT_YET, check_python

CARRIES = Path(__file__).resolve().parents[3] / ".gpu_box"
MODULES = (
    "vllm._C_stable_libtorch",
    "vllm.fs_io_C",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.compilation.backends",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.tiering.spec",
    "offload.connector",
    "bench.serve",
)


def unpack() -> dict[str, float]:
    """Unpack the carries that have arrived since the last call, and return the time of each in
    seconds. Exits with ``NOT_YET`` if some are still missing, and with another code if they are for
    another Python."""
    SITE.mkdir(parents=True, exist_ok=True)
    times = {}
    for carry in sorted(CARRIES.glob("carry-*.zip")):
        done = SITE / f".{carry.name}.done"
        if not done.exists():
            began = time.monotonic()
            with zipfile.ZipFile(carry) as archive:
                archive.extractall(SITE)
            done.touch()
            times[f"unpack {carry.name}"] = round(time.monotonic() - began, 1)
    result(times)
    facts = SITE / FACTS
    if not facts.exists():
        print(f"vLLM is not installed, and there is no carry-N.zip in {CARRIES}: run pack.py")
        sys.exit(NOT_YET)
    packed = json.loads(facts.read_text())
    check_python(packed["python"])
    missing = [name for name in packed["carries"] if not (SITE / f".{name}.done").exists()]
    if missing:
        print(f"not here yet: {', '.join(missing)}; run this probe again when they are")
        sys.exit(NOT_YET)
    return times


def main() -> None:
    times: dict[str, float | str] = {}
    if importlib.util.find_spec("vllm") is None:
        times |= unpack()
        use_site()
    for name in MODULES:
        began = time.monotonic()
        try:
            importlib.import_module(name)
            times[f"import {name}"] = round(time.monotonic() - began, 1)
        except Exception as error:  # the probe reports any exception of an import
            times[f"import {name}"] = f"{type(error).__name__}: {error}"
        result(times)
    failed = [name for name, value in times.items() if isinstance(value, str)]
    if failed:
        sys.exit(f"not imported: {failed}")


if __name__ == "__main__":
    main()

"""Runs ``bench serve`` with random weights: what offloading gains and costs, compared with vLLM's
own offloading. The rows of systems that do not start say why.

    python rivals.py --model llama-8b -- ARGUMENTS OF bench serve
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from site_path import use_site

use_site()

from common import result  # noqa: E402  # after the path

MODELS = Path(__file__).resolve().parents[1] / "models"
GPU = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1}
"""FlashAttention 3 is packed, but was not tested with another torch. All engines are on the GPU at
once, so none may require most of its memory to be free; the size of the KV cache is given."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="one of the box, or a folder")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    folder = MODELS / options.model
    model = folder if (folder / "config.json").exists() else Path(options.model)
    command = [sys.executable, "-m", "bench.serve", "--json", "--model", str(model)]
    command += ["--engine", json.dumps({} if options.cpu else GPU), *options.arguments]
    if "--help" in options.arguments:
        return subprocess.run(command).returncode
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    result({"report": report})
    refused = [row["series"] for row in report["rows"] if row["case"] == "does not run here"]
    print("\n".join(refused))
    return int(any(text.startswith("kvtiers") for text in refused))


if __name__ == "__main__":
    sys.exit(main())

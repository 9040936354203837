"""Runs ``bench copy`` on the GPU, one chunk size after the other, and reports the targets that were
missed. The sizes with targets come first."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from common import result

from bench.copy_targets import missed, untried

SIZES = ("2MiB", "1MiB", "16MiB", "4MiB", "256KiB", "64KiB")


def main() -> None:
    whole: dict[str, Any] = {}
    for size in SIZES:
        command = [sys.executable, "-m", "bench.copy", "--device", "cuda", "--job", "512MiB"]
        command += ["--cache", "4GiB", "--rounds", "5", "--sizes", size, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        report = json.loads(done.stdout)
        whole = whole or report | {"rows": []}
        whole["rows"] += report["rows"]
        result({"missed": missed(whole) + untried(whole), "report": whole})


if __name__ == "__main__":
    main()

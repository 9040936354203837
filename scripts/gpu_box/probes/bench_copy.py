"""Runs ``bench copy`` on the GPU and reports the targets that were missed."""

from __future__ import annotations

import json
import subprocess
import sys

from common import result

from bench.copy_targets import missed, untried

SIZES = "64KiB,256KiB,1MiB,2MiB,4MiB,16MiB"


def main() -> None:
    command = [sys.executable, "-m", "bench.copy", "--device", "cuda", "--job", "512MiB"]
    command += ["--cache", "4GiB", "--rounds", "5", "--sizes", SIZES, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    result({"missed": missed(report) + untried(report), "report": report})


if __name__ == "__main__":
    main()

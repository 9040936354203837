"""Runs pytest in forked children of a process that has imported the slow libraries once.

    python -m tests.mutants.server MODULE ...

An order is a line of JSON on the standard input: pytest's ``arguments`` and the file that gets its
``output``. Two lines answer it: when the child has begun, its process id, which is also its process
group's; when it has ended, its exit code (negative: the signal). The server ends when its input
ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.catalogue import PRODUCT


def main(modules: Sequence[str]) -> None:
    """Import, then serve."""
    for module in modules:
        importlib.import_module(module)
    ours = [name for name in sys.modules if name.partition(".")[0] in PRODUCT]
    if ours:
        raise SystemExit(f"no fault could be planted in what is imported already: {ours}")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            run(order["arguments"], Path(order["output"]))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(arguments: Sequence[str], output: Path) -> None:
    """Run pytest in the child, and end with its exit code."""
    code = 3
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        code = int(pytest.main(list(arguments)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a hung test may have left threads


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs a command as if on a slow, busy machine:

    python scripts/slow_machine.py [--busy 2] [--nice 10] [--stops] -- ./run test

``--busy`` is the number of loops that compete for the processors. The command runs under ``nice``.
With ``--stops``, all of its processes are stopped now and then for up to two seconds (SIGSTOP), as
on a virtual machine with an overloaded host. A test that fails only here has too short a deadline
for something that must succeed, or sleeps where it should wait. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=2, help="number of busy loops")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the command")
    parser.add_argument("--stops", action="store_true", help="stop the command now and then")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command was given")
    print(f"slow_machine: seed {arguments.seed}", file=sys.stderr)
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(arguments.busy)]
    ended = threading.Event()
    try:
        child = subprocess.Popen(["nice", f"-n{arguments.nice}", *command])
        if arguments.stops:
            draw = random.Random(arguments.seed)
            threading.Thread(target=_stop_now_and_then, args=(child.pid, draw, ended)).start()
        return child.wait()
    finally:
        ended.set()
        for each in loops:
            each.kill()
            each.wait()


def _stop_now_and_then(root: int, draw: random.Random, ended: threading.Event) -> None:
    while not ended.wait(draw.uniform(0.5, 8.0)):
        found = _descendants(root)
        _signal(found, signal.SIGSTOP)
        ended.wait(draw.uniform(0.1, 2.0))
        _signal(found, signal.SIGCONT)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(root: int) -> list[int]:
    """The process and all its descendants, parents first."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text()
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


if __name__ == "__main__":
    sys.exit(main())

"""Processes that fork: their children have copies of all open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBC = ctypes.PyDLL(None)
FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "library": LIBC.fork}
"""A fork of a library does not run Python's handlers."""

LIFE_S = 60.0
FORK_AND_DIE = f"""
import os, signal, sys, time

def fork_and_die():
    child = os.fork()
    if not child:
        os.close(1)
        time.sleep({LIFE_S})
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def forked(fork: str) -> int:
    """Fork a child that lives until it is killed."""
    child = FORKS[fork]()
    if not child:
        LIBC.pause()
        os._exit(0)
    return child


@contextlib.contextmanager
def child_of_killed(script: str, *arguments: object) -> Iterator[None]:
    """Run a script whose function ``fork_and_die`` forks a child with ``os.fork`` and kills the
    script. The child lives during the block, which must not take longer than ``LIFE_S``."""
    code = FORK_AND_DIE + script
    command = [sys.executable, "-c", code, *map(str, arguments)]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    child = int(killed.stdout)
    try:
        yield
        assert is_alive(child), "the block waited for the end of the child"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"

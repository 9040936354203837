"""Runs a program on a terminal that a test controls: the test reads the output and presses keys."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.offload.cli.rank_folders import ROOT
from tests.patience import PATIENCE_S

CTRL_C = b"\x03"


class Terminal:
    """One program whose input and output are this terminal."""

    def __init__(self, process: subprocess.Popen[bytes], keys: int, name: str) -> None:
        self.process = process
        self._keys = keys
        self._name = name
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read the output until it contains ``text``."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert self._read(end), f"it ended, or {PATIENCE_S} s passed: {self.shown[-2000:]}"

    def press(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def wait_until_read(self) -> None:
        """Wait until the program has read everything that was pressed."""
        end = time.monotonic() + PATIENCE_S
        count = array.array("i", [1])
        screen = os.open(self._name, os.O_RDWR | os.O_NOCTTY)
        try:
            while count[0]:
                fcntl.ioctl(screen, termios.FIONREAD, count)
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            os.close(screen)

    def end(self) -> int:
        """Read everything up to the end of the program; return its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self._read(end):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, end: float) -> bool:
        """Read the next output; return ``False`` at the end."""
        ready, _, _ = select.select([self._keys], [], [], max(0.0, end - time.monotonic()))
        try:
            found = os.read(self._keys, 1 << 16) if ready else b""
        except OSError:  # the program has closed its side
            found = b""
        self.shown += found.decode(errors="replace")
        return bool(found)


@contextmanager
def on_a_terminal(*words: object) -> Iterator[Terminal]:
    """Start ``kvtiers`` with these arguments, as a shell does: Ctrl-C reaches it and its
    children."""
    keys, screen = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "offload.cli", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    name = os.ttyname(screen)
    os.close(screen)
    try:
        yield Terminal(process, keys, name)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(PATIENCE_S)
        os.close(keys)

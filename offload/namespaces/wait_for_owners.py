"""Waits for servers that are about to end, so that restarts can overlap.

Kubernetes and systemd can start a server while its predecessor still writes its last blocks and
holds its folders.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=Exception)
T = TypeVar("T")
OWNERS_WAIT_S = 30.0
"""The time that Kubernetes gives a container to end."""
LINE_EVERY_S = 5.0
LOOK_EVERY_S = 0.25


class Patience:
    """One time limit of half a minute for all waits of a process; it starts with the first wait.

    ``report`` gets a line at once and then every few seconds. ``wait`` and ``repeat`` block, so
    vLLM's threads must not call them while they serve.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._until = self._next_line = 0.0

    def wait(self, what: str) -> bool:
        """Wait a moment for ``what`` to change. Returns False when the time is up."""
        now = time.monotonic()
        self._until = self._until or now + OWNERS_WAIT_S
        left = self._until - now
        if left <= 0:
            return False
        if now >= self._next_line:
            self._report(f"{what}: waiting up to {left:.0f} s for it to end")
            self._next_line = now + LINE_EVERY_S
        time.sleep(min(LOOK_EVERY_S, left))
        return True

    def repeat(self, call: Callable[[], T], error: type[E], what: Callable[[E], str]) -> T:
        """Repeat ``call`` while it raises ``error`` and a wait may help. Return its result.

        ``what`` returns a text that names what to wait for. Raises the ``error`` if the text is
        empty, or when the time is up.
        """
        while True:
            try:
                return call()
            except error as raised:
                held = what(raised)
                if not held or not self.wait(held):
                    raise

"""Waits for servers that are about to end, so that restarts can overlap.

Kubernetes and systemd can start a server while its predecessor still writes its last blocks and
holds its folders.
"""

from __future__ import annotations

import time
from collections.abc import Callable

OWNERS_WAIT_S = 30.0
"""The time that Kubernetes gives a container to end."""
LINE_EVERY_S = 5.0
LOOK_EVERY_S = 0.25


class Patience:
    """One time limit of half a minute for all waits of a process; it starts with the first wait.

    ``say`` gets a line at once and then every few seconds. Blocks; never for vLLM's threads while
    they serve.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._until = self._next_line = 0.0

    def wait(self, what: str) -> bool:
        """Wait a moment for ``what`` to change. Returns False when the time is up."""
        now = time.monotonic()
        self._until = self._until or now + OWNERS_WAIT_S
        left = self._until - now
        if left <= 0:
            return False
        if now >= self._next_line:
            self._say(f"{what}: waiting for its end, up to {left:.0f} s")
            self._next_line = now + LINE_EVERY_S
        time.sleep(min(LOOK_EVERY_S, left))
        return True

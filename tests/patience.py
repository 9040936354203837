"""How tests wait: for an event that must happen, or until tasks can get no further."""

from __future__ import annotations

import asyncio

PATIENCE_S = 600.0
"""Far longer than anything takes on the slowest machine. When this time is over, the test fails, so
that no test waits forever; pytest's own limit (``timeout`` in pyproject.toml) is longer."""


async def turns(count: int = 10) -> None:
    """Let the event loop run this often. A task that waits only for events inside the loop has then
    progressed as far as it can, on any machine."""
    for _ in range(count):
        await asyncio.sleep(0)

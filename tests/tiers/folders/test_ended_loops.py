"""A script fails while it reads from a tier or writes to it: ``asyncio.run`` cancels every task,
including those of the tier, and returns only when no thread uses the script's buffers any more."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import turns
from tests.tiers.folders.test_open_failures import MAKERS
from tiers.base import Buffer
from tiers.folders.folder_tier import FolderTier
from tiers.io.threads import in_thread
from tiers.testing import aligned, key_of, payload_of

SIZE = 8192
KEYS = [key_of(n) for n in range(6)]
CALLS = {
    ("lmdb", "read"): "preadv",
    ("lmdb", "write"): "pwritev",
    ("shared lmdb", "read"): "preadv",
    ("shared lmdb", "write"): "pwritev",
    ("file", "read"): "readv",
    ("file", "write"): "write",
    ("shared file", "read"): "readv",
    ("shared file", "write"): "write",
}
"""The system call by which each kind of tier moves payloads."""


class ScriptError(Exception):
    """A fault of the script."""


class Held:
    """A system call that hangs in a tier's threads until it is released. ``started`` is set when
    one hangs; ``running`` are the threads inside. ``is_alone`` means that the operation ended while
    calls hung."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.started, self.released = threading.Event(), threading.Event()
        self.running: set[int] = set()
        self.is_alone = False

    def __call__(self, *arguments: Any) -> Any:
        thread = threading.current_thread()
        if not thread.name.startswith("tier-"):
            return self._call(*arguments)
        assert thread.ident is not None
        self.running.add(thread.ident)
        self.started.set()
        self.released.wait()
        try:
            return self._call(*arguments)
        finally:
            self.running.discard(thread.ident)


async def release_at_the_end(held: Held, operation: asyncio.Future[object]) -> None:
    """Release the calls when the loop ends and the operation has had time to end before them."""
    try:
        await asyncio.Event().wait()
    finally:
        await turns(50)
        held.is_alone = operation.done()
        held.released.set()


async def fail_during(tier: FolderTier[Any], what: str, held: Held, data: list[Buffer]) -> None:
    calls = {"read": tier.read, "write": tier.write}
    operation = asyncio.ensure_future(calls[what](KEYS, data))
    await in_thread(held.started.wait)
    releasing = asyncio.ensure_future(release_at_the_end(held, operation))
    await turns(1)
    raise ScriptError(f"{releasing} has begun")


@pytest.mark.parametrize(("kind", "what"), CALLS)
def test_a_loop_ends_after_the_threads_that_use_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    tier = MAKERS[kind](tmp_path / "tier")
    assert isinstance(tier, FolderTier)
    stored = [payload_of(key, SIZE) for key in KEYS]
    data = [aligned(SIZE) for _ in KEYS] if what == "read" else stored
    name = CALLS[kind, what]
    held = Held(getattr(os, name))

    async def main() -> None:
        await tier.open()
        if what == "read":
            await tier.write(KEYS, stored)
        monkeypatch.setattr(os, name, held)
        await fail_during(tier, what, held, data)

    try:
        with pytest.raises(ScriptError):
            asyncio.run(main())
        running, found = len(held.running), [each.copy() for each in data]
    finally:
        held.released.set()
        for threads in tier._threads_in_use():
            threads.stop()
        assert tier._files is not None
        tier._files.close()
    assert not held.is_alone, "the operation ended, although its threads used the buffers"
    assert running == 0, "a thread still used the buffers"
    assert np.array_equal(found, data), "a thread changed the buffers later"
    assert np.array_equal(found, stored), "the threads must finish the call that they have begun"

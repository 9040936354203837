"""The loop in a thread: what it leaves behind when it stops."""

from __future__ import annotations

import asyncio
import threading

from offload.loop import EventLoopThread
from tests.patience import PATIENCE_S


async def hang(begun: threading.Event, ended: threading.Event) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_tasks_release_their_resources_when_the_loop_stops() -> None:
    begun, ended = threading.Event(), threading.Event()
    loop = EventLoopThread()
    loop.start(hang(begun, ended))
    assert begun.wait(PATIENCE_S)
    assert loop.stop(PATIENCE_S)
    assert ended.is_set()
    assert loop.loop.is_closed()


def test_a_task_that_does_not_end_does_not_block_the_loops_end() -> None:
    begun = threading.Event()

    async def stubborn() -> None:
        begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    loop = EventLoopThread()
    loop.start(stubborn())
    assert begun.wait(PATIENCE_S)
    assert loop.stop(PATIENCE_S)

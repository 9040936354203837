"""The writer of the request log and the recorded trace: order, limits, and a disk that hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from offload.requests.background_writer import WAITING_ITEMS_MAX, BackgroundWriter
from tests.patience import PATIENCE_S
from tests.threads import no_thread_is_left


class Disk:
    """Accepts numbers once it is ``free``, on the writer's executor."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.busy = threading.Event()
        self.free = threading.Event()

    async def write(self, batches: AsyncIterator[list[int]], executor: Executor) -> None:
        async for batch in batches:
            await asyncio.get_running_loop().run_in_executor(executor, self._take, batch)

    def _take(self, batch: list[int]) -> None:
        self.busy.set()
        assert self.free.wait(PATIENCE_S)
        self.taken += batch


def test_everything_is_written_in_order_before_it_is_closed() -> None:
    disk = Disk()
    disk.free.set()
    with no_thread_is_left():
        writer = BackgroundWriter("test", "writing", disk.write)
        for number in range(WAITING_ITEMS_MAX):
            writer.put(number)
        writer.close(PATIENCE_S)
        writer.close(PATIENCE_S)
    assert disk.taken == list(range(WAITING_ITEMS_MAX))
    writer.put(-1)
    assert writer.dropped == 1


def test_waiting_items_are_bounded_over_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    with no_thread_is_left():
        writer = BackgroundWriter("test", "writing", disk.write)
        writer.put(0)
        assert disk.busy.wait(PATIENCE_S)
        for number in range(1, WAITING_ITEMS_MAX + 4):
            writer.put(number)  # never waits, because nothing frees the disk meanwhile
        assert writer.dropped == 3
        disk.free.set()
        writer.close(PATIENCE_S)
    assert disk.taken == list(range(WAITING_ITEMS_MAX + 1))
    assert not [record for record in caplog.records if "did not end" in record.message]


HUNG = """
import os, sys, threading
hangs = threading.Event()
def hang(*_):
    hangs.set()
    threading.Event().wait()
os.replace = hang  # before aiofiles takes it
from offload.requests.request_log import LoggedRequest
from offload.requests.request_file import RequestFile
file = RequestFile(sys.argv[1], 8)
file(LoggedRequest("r", 0.0, 1, 0))
assert hangs.wait(float(sys.argv[2]))
file.close(0.05)
print("closed")
"""


HUNG_AT_CLOSE = """
import io, sys, threading
import aiofiles.threadpool
hangs = threading.Event()
class Hung:
    def close(self):
        hangs.set()
        threading.Event().wait()
class HungWriter(Hung, io.BufferedWriter): pass
class HungReader(Hung, io.BufferedReader): pass
def hung(path, mode, opener, **_options):
    file = io.FileIO(path, mode, opener=opener)
    return HungReader(file) if mode == "rb" else HungWriter(file)
aiofiles.threadpool.sync_open = hung
from offload.requests.request_file import RequestFile
from offload.requests.trace_recorder import TraceRecorder
file = MADE
file.close(0.05)
assert hangs.wait(float(sys.argv[2]))
print("closed")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(HUNG, id="rename"),
        pytest.param(HUNG_AT_CLOSE.replace("MADE", "RequestFile(sys.argv[1], 8)"), id="log"),
        pytest.param(HUNG_AT_CLOSE.replace("MADE", "TraceRecorder(sys.argv[1], 16)"), id="trace"),
    ],
)
def test_a_process_with_a_dead_disk_exits(tmp_path: Path, program: str) -> None:
    """A thread that the interpreter joins at exit would block the exit forever."""
    path = tmp_path / "requests.jsonl"
    path.write_text("{}\n")
    command = [sys.executable, "-c", program, str(path), str(PATIENCE_S)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr

"""A master or another engine of a Mooncake store that exists but does not respond: every call ends,
none reports "absent", and late data does no harm."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.tiers.mooncake.real_store import Master, replaceable_stores, skip_without_mooncake
from tiers.base import ReadOutcome, TierIoError
from tiers.mooncake import bounce_buffers as bounce_buffers
from tiers.mooncake.client import MooncakeClient
from tiers.record import Identity
from tiers.testing import key_of

skip_without_mooncake()


def test_a_hanging_master_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    data = [np.zeros(4096, np.uint8)]
    stores = replaceable_stores(monkeypatch)
    with Master(tmp_path / "log") as master:
        start = data[0].ctypes.data
        memory = range(start, start + data[0].nbytes)
        client = joined(master, memory)
        until_it_answers(client, data)
        master.stop()
        with pytest.raises(TierIoError, match="does not answer"):
            client.present([key_of(0)], 0)
        with pytest.raises(TierIoError, match="does not answer"):
            client.put([key_of(1)], 0, data)
        with pytest.raises(TierIoError, match="does not answer"):
            client.get([key_of(0)], 0, data)
        with pytest.raises(TierIoError, match="does not answer"):
            client.remove([key_of(0)], 0)
        client.close()  # if tried, this would stop every thread of the process for 90 s
        master.resume()
        stores[-1].close()  # now, not at the end of the process


def joined(master: Master, memory: range) -> MooncakeClient:
    """A client. On a busy machine, the master may need longer to answer than this test allows."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(TierIoError):
            return MooncakeClient(master.settings(32 << 20), Identity(), memory)
    raise AssertionError("the master never answers in time")


def until_it_answers(client: MooncakeClient, data: list[Any]) -> None:
    """Write a record and read it. On a busy machine, the master may need longer than this test
    allows it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(TierIoError):
            client.put([key_of(0)], 0, data)
            if client.get([key_of(0)], 0, data) == [ReadOutcome.OK]:
                return
    raise AssertionError("the master never answers in time")


RECORDS, SIZE = 8, 16 << 20
OTHER = f"""
import os, sys
import numpy as np
from tiers.mooncake.client import MooncakeClient, MooncakeSettings
from tiers.record import Identity
from tiers.testing import key_of
settings = MooncakeSettings(sys.argv[1], sys.argv[2], 400 << 20, host="127.0.0.1")
client = MooncakeClient(settings, Identity(), None)
data = [np.full({SIZE}, n + 1, np.uint8) for n in range({RECORDS})]
client.put([key_of(n) for n in range({RECORDS})], 0, data)
print("stored", flush=True)
sys.stdin.read()
os._exit(0)
"""


class StopsOther:
    """A store whose peer is stopped when the first bytes of a read have arrived."""

    def __init__(self, store: Any, other: subprocess.Popen[bytes]) -> None:
        self._store = store
        self._other = other
        self._places: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def written(self) -> int:
        return sum(int(np.count_nonzero(place)) for place in self._places)

    def batch_get_into_multi_buffers(self, names: list[str], at: Any, sizes: Any) -> Any:
        memory = [(ctypes.c_uint8 * SIZE).from_address(place) for _, place in at]
        self._places = [np.ctypeslib.as_array(place) for place in memory]
        for place in self._places:
            place[:] = 0
        watch = threading.Thread(target=self._stop_when)
        watch.start()
        codes = self._store.batch_get_into_multi_buffers(names, at, sizes)
        watch.join()
        return codes

    def _stop_when(self) -> None:
        while not any(place[::4096].any() for place in self._places):
            pass
        self._other.send_signal(signal.SIGSTOP)


@pytest.mark.skipif(
    "KVTIERS_MOONCAKE_HANGS" not in os.environ, reason="KVTIERS_MOONCAKE_HANGS=1: over a minute"
)
def test_late_bytes_are_not_written_into_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake abandons a transfer after a minute; when the peer continues, so does the transfer.
    By then the slots may hold other blocks."""
    monkeypatch.setattr(bounce_buffers, "BUFFER_BYTES", RECORDS * SIZE)  # all of them in one call
    slab = np.zeros(RECORDS * SIZE, np.uint8)
    slots = [slab[n * SIZE : (n + 1) * SIZE] for n in range(RECORDS)]
    keys = [key_of(n) for n in range(RECORDS)]
    memory = range(slab.ctypes.data, slab.ctypes.data + slab.nbytes)
    stores = replaceable_stores(monkeypatch)
    with Master(tmp_path / "log") as master:
        client = MooncakeClient(master.settings(0), Identity(), memory)
        arguments = [sys.executable, "-c", OTHER, master.address, master.metadata]
        with subprocess.Popen(arguments, stdin=PIPE, stdout=PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"stored\n"
            stores[0].now = stopping = StopsOther(stores[0].real, other)
            outcomes = client.get(keys, 0, slots)
            assert ReadOutcome.OK not in outcomes
            before = stopping.written()
            slab[:] = 0xEE  # other blocks
            other.send_signal(signal.SIGCONT)
            while stopping.written() == before:
                pass  # the transfer does continue, otherwise the test would show nothing
            other.kill()
        assert (slab == 0xEE).all()
        client.close()

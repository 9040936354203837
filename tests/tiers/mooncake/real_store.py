"""Mooncake for tests, if it can be used on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from demo import mooncake
from tests.patience import PATIENCE_S
from tiers.base import TierIoError
from tiers.io import timed_calls
from tiers.io.timed_calls import ANSWER_TIMEOUT_S
from tiers.mooncake import client as mooncake_client
from tiers.mooncake.client import MooncakeSettings


def skip_without_mooncake() -> None:
    """While it is imported, skip the calling module with the reason if Mooncake cannot be used."""
    if missing := mooncake.why_not():
        pytest.skip(f"needs Mooncake: {missing}", allow_module_level=True)


class Master(mooncake.Master):
    """A master with settings for tiers."""

    def settings(self, segment_bytes: int = 256 << 20) -> MooncakeSettings:
        return MooncakeSettings(self.address, self.metadata, segment_bytes, host="127.0.0.1")

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Send SIGSTOP: from the return of this call on, the master accepts connections but does
        not respond."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Send SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class OneClient:
    """A store client shared by the tiers of many tests, because joining and leaving take a second
    each."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._registered: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def register_buffer(self, address: int, nbytes: int) -> int:
        self._registered.add(address)
        return int(self._store.register_buffer(address, nbytes))

    def unregister_buffer(self, address: int) -> int:
        self._registered.discard(address)
        return int(self._store.unregister_buffer(address))

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister_buffer(address)


class ReplaceableStore:
    """A client's store. Calls go to ``now``, which a test may replace by a faulty one."""

    def __init__(self, real: Any) -> None:
        self.real = self.now = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


def replaceable_stores(monkeypatch: pytest.MonkeyPatch) -> list[ReplaceableStore]:
    """The stores that clients join from now on, in this order."""
    join, made = mooncake_client.join_store, list[ReplaceableStore]()

    def joined(settings: MooncakeSettings) -> ReplaceableStore:
        made.append(ReplaceableStore(join(settings)))
        return made[-1]

    monkeypatch.setattr(mooncake_client, "join_store", joined)
    return made


def time_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls end soon if the master hangs. On a busy machine, a healthy master may need longer
    to answer, so clients try to join it until it does."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    monkeypatch.setattr(timed_calls, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    join = mooncake_client.join_store

    def joined(settings: MooncakeSettings) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(TierIoError):
                return join(settings)
        raise AssertionError("the master never answers in time")

    monkeypatch.setattr(mooncake_client, "join_store", joined)


def record_name(key: bytes, *, namespace: bytes, rank: int = 0) -> str:
    """The object of a record of epoch 0."""
    return f"kvtiers/{namespace.hex()}/0/{rank}/{key.hex()}"


@contextmanager
def one_store(master: Master) -> Iterator[Any]:
    """Join the master once, and leave at the end; a ``OneClient`` per tier shares this client."""
    store = mooncake_client.join_store(master.settings())
    try:
        yield store
    finally:
        store.close()

"""A TCP proxy in front of a Mooncake master, which kills the master in the middle of a transfer.

A client transfers records in three steps: the master names their places, the bytes are moved, and
the master is asked again (it marks a written record as complete). After the first step the proxy
kills the master, and only then delivers the reply.

The proxy is a process, because Mooncake holds the GIL while it joins a store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from demo.ports import free_port
from tests.tiers.mooncake.real_store import Master

RECEIVED_BYTES = 1 << 16


class InterruptingProxy:
    """The proxy's process. It forwards every connection to ``address`` on to ``master``."""

    def __init__(self, master: Master) -> None:
        self._master = master
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(port), str(master.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait_for("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def expect(self, name: str) -> None:
        """When the master replies to the next request that contains this name, kill the master, and
        deliver the reply."""
        assert self._process.stdin is not None
        print(self._master.pid, name, file=self._process.stdin, flush=True)
        self._wait_for("expected")

    def wait_until_killed(self) -> None:
        """Return when the master has been killed since ``expect``."""
        self._wait_for("killed")
        self._master.kill()  # waits for it

    def _wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"


class _Forwarder:
    """Runs in the proxy's process."""

    def __init__(self, port: int, master_port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self._master_port = master_port
        self._lock = threading.Lock()
        self._master_pid, self._name = 0, b""

    def run(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            pid, name = line.split()
            with self._lock:
                self._master_pid, self._name = int(pid), name.encode()
            print("expected", flush=True)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                master = socket.create_connection(("127.0.0.1", self._master_port))
            except OSError:  # dead
                client.close()
                continue
            threading.Thread(target=self._forward, args=(client, master), daemon=True).start()

    def _forward(self, client: socket.socket, master: socket.socket) -> None:
        """Forward in both directions until one side ends."""
        arguments = (client, master, threading.Event())
        replies = threading.Thread(target=self._replies, args=arguments, daemon=True)
        with client, master:
            replies.start()
            self._requests(*arguments)
            replies.join()

    def _requests(
        self, client: socket.socket, master: socket.socket, is_last: threading.Event
    ) -> None:
        """Forward requests; set ``is_last`` before one whose reply is to be the last."""
        request = b""
        with _until_both_end(master):
            while data := client.recv(RECEIVED_BYTES):
                with self._lock:
                    request = request + data if self._name else b""
                    if self._name and self._name in request:
                        self._name = b""
                        is_last.set()
                master.sendall(data)

    def _replies(
        self, client: socket.socket, master: socket.socket, is_last: threading.Event
    ) -> None:
        with _until_both_end(client):
            while data := master.recv(RECEIVED_BYTES):
                if is_last.is_set():
                    os.kill(self._master_pid, signal.SIGKILL)
                    with contextlib.suppress(ConnectionResetError):
                        while more := master.recv(RECEIVED_BYTES):
                            data += more
                    print("killed", flush=True)
                client.sendall(data)


@contextmanager
def _until_both_end(other: socket.socket) -> Iterator[None]:
    """Forward until one side ends or is reset; then end the other side."""
    with contextlib.suppress(OSError):
        yield
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    _Forwarder(*map(int, sys.argv[1:])).run()

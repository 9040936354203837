"""Ports belong to no other process, neither now nor after a restart of the server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from demo import ports

ROOT = Path(__file__).resolve().parents[2]
TAKE_THREE = (
    "import demo.ports as p; p._range = lambda: range({first}, {last} + 1); "
    "print(*[p.free_port() for _ in range(3)], flush=True); input()"
)


def test_a_port_is_below_those_of_outgoing_connections() -> None:
    first = int(ports.EPHEMERAL.read_text().split()[0])
    if first < ports.LOWEST + ports.ENOUGH:
        pytest.skip(f"nearly all ports from {first} on are ephemeral here")
    assert ports.LOWEST <= ports.free_port() < first


def take_all() -> list[int]:
    """Take all free ports, and return them."""
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(ports.free_port())
    return taken


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, this one or another, gets a port again as long as its first owner lives."""
    first = ports.free_port()
    at = range(first - 60, first + 60)
    monkeypatch.setattr(ports, "_range", lambda: at)
    program = TAKE_THREE.format(first=at.start, last=at.stop - 1)
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    theirs = [int(port) for port in other.stdout.readline().split()]
    assert len(theirs) == 3
    ours = [first, *take_all()]
    other.communicate("\n")
    assert len(ours) > 3
    assert len({*ours, *theirs}) == len(ours) + 3
    assert ports.free_port()  # the port that it held


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setattr(ports, "_range", lambda: range(port, port + 1))
        with pytest.raises(OSError, match="no port"):
            ports.free_port()

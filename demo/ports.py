"""TCP ports for servers that are started, killed and started again on the same port."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

LOWEST, ENOUGH = 20_000, 1_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FIRST = 32_768

_held: list[int] = []


def free_port() -> int:
    """Return a port on which no process listens. It belongs to this process until it ends.

    The returned port is below the ephemeral range, because the kernel assigns ports of that range
    to outgoing connections, even while a server restarts. A file lock keeps other processes that
    call this function from choosing the same port. Raises ``OSError`` if no port is free.
    """
    folder = Path(tempfile.gettempdir()) / f"kvtiers-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    ports = _range()
    for port in random.sample(ports, len(ports)):
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if _is_free(lock, port):
            _held.append(lock)
            return port
        os.close(lock)
    raise OSError(f"no port from {ports.start} to {ports.stop - 1} is free")


def _range() -> range:
    try:
        end = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        end = EPHEMERAL_FIRST
    if end < LOWEST + ENOUGH:  # almost all ports of this machine are ephemeral
        end = EPHEMERAL_FIRST
    return range(LOWEST, end)


def _is_free(lock: int, port: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

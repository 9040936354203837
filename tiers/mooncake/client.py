"""Blocking calls to a Mooncake store: memory, keys and codes. Any thread may call, several at once.

A record is one object of the store: our header (``record``), then the payload. The store takes both
from where they lie and puts them back there (``..._multi_buffers``), so that a payload in a slot is
not copied when it is written. What is read, and every header, lies in ``BounceBuffers``: a call
that Mooncake has given up may go on moving bytes.

The codes are those of ``ErrorCode`` in mooncake-store/include/types.h.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tiers.base import Buffer, Key, ReadOutcome, TierIoError, WriteOutcome
from tiers.mooncake.bounce_buffers import BUFFER_BYTES, BounceBuffers, portions
from tiers.record import HEADER_BYTES, Identity, seal, verify

BATCH = 64
"""Records in one call of the store."""
HEADER_STEP = 128
HEADERS_BYTES = BATCH * HEADER_STEP
CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_MS = 4000
"""How long Mooncake waits for its master to answer; 30 s if nobody says so."""
SETUP_BUFFER_BYTES = 16 << 20
"""What the store keeps for copies of its own; we make none."""

NO_SPACE = -200
NO_SUCH_OBJECT = -704
NOT_READY = -703
MASTER_AWAY = (-900, -901)
"""It is not there; it is there and does not answer in time."""
HEALTHY = 0
ABSENT = (NO_SUCH_OBJECT, NOT_READY)
EXISTS = -705
NOT_TAKEN = (NO_SPACE, EXISTS)
DOCUMENT_BYTES_MAX = 2 << 20
DOCUMENT_COPIES = 3


@dataclass(frozen=True)
class MooncakeSettings:
    """``master`` is ``host:port``, ``metadata`` a URL or ``P2PHANDSHAKE``; ``segment_bytes`` of
    this process's memory are given to the store; ``host`` is how others reach this machine
    ("": find out); ``device`` are RDMA devices, with commas ("": all)."""

    master: str
    metadata: str
    segment_bytes: int = 0
    protocol: str = "tcp"
    device: str = ""
    host: str = ""


def why_not() -> str:
    """Why Mooncake cannot be used here; "" if it can. Loads its libraries."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:  # the package, or one of the system's libraries
        return str(error)
    return ""


class MooncakeClient:
    """A connection to a store. ``memory`` are addresses that records are mostly read into and
    written from; it is registered once. Raises ``TierIoError`` if the store cannot be joined."""

    def __init__(
        self, settings: MooncakeSettings, identity: Identity, memory: range | None
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._memory = memory or range(0)
        self._store = _joined(settings)
        about = (settings.protocol, self._register, self._store.unregister_buffer)
        self._payload_buffers = BounceBuffers(*about, BUFFER_BYTES + HEADERS_BYTES)
        self._header_buffers = BounceBuffers(*about, HEADERS_BYTES)
        try:
            if self._memory:
                self._register(self._memory.start, len(self._memory))
        except BaseException:
            self._store.close()
            raise

    @property
    def is_healthy(self) -> bool:
        """Whether the master answers, as far as the client knows."""
        return bool(self._store.health_check() == HEALTHY)

    def close(self) -> None:
        """Leave the store; what lies in this process's segment is gone for everybody.

        Without a master that answers it takes Mooncake a quarter of a minute, in which no Python
        thread of the process runs (it keeps the interpreter's lock, and its destructor does the
        same). The end of the process leaves the store as well, so that is left to it then.
        """
        if _is_reachable(self._settings.master) and self._answers():
            self._store.close()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    # -- records -----------------------------------------------------------------------------

    def name(self, key: Key, epoch: int, of: Identity | None = None) -> str:
        """The object's name. With namespace, epoch and rank in it nobody meets others' records,
        unless their identity is known (``of``)."""
        namespace, rank = of or self._identity
        return f"kvtiers/{namespace.hex()}/{epoch:x}/{rank}/{key.hex()}"

    def present(self, keys: Sequence[Key], epoch: int, of: Identity | None = None) -> list[bool]:
        """Which records are there: our own, or those of somebody else."""
        return [code == 1 for code in self._exist([self.name(key, epoch, of) for key in keys])]

    def put(self, keys: Sequence[Key], epoch: int, data: Sequence[Buffer]) -> list[WriteOutcome]:
        """Store different keys, at most ``BATCH``. Those that are there stay as they are."""
        names = [self.name(key, epoch) for key in keys]
        outcomes = [WriteOutcome.OK] * len(keys)
        fresh = [n for n, code in enumerate(self._exist(names)) if code != 1]
        if not fresh:
            return outcomes
        buffers = [data[n] for n in fresh]
        outside = [n for n, buffer in enumerate(buffers) if not self._is_known(buffer)]
        with (
            self._header_buffers.lend([HEADER_STEP] * len(fresh)) as headers,
            self._payload_buffers.lend([buffers[n].nbytes for n in outside]) as copies,
        ):
            for place, n in zip(headers.parts, fresh, strict=True):
                sealed = seal(self._identity, keys[n], epoch, data[n], data[n].nbytes)
                place[:HEADER_BYTES] = np.frombuffer(sealed, np.uint8)
            for place, n in zip(copies.parts, outside, strict=True):
                np.copyto(place, buffers[n])
                buffers[n] = place
            codes = self._store.batch_put_from_multi_buffers(
                [names[n] for n in fresh], *_parts(headers.parts, buffers)
            )
            self._header_buffers.ended(headers, codes, NOT_TAKEN)
            self._payload_buffers.ended(copies, codes, NOT_TAKEN)
        for n, code in zip(fresh, _checked(codes), strict=True):
            if code != 0:
                outcomes[n] = WriteOutcome.FULL if code == NO_SPACE else WriteOutcome.FAILED
        return outcomes

    def get(
        self,
        keys: Sequence[Key],
        epoch: int,
        into: Sequence[Buffer],
        of: Identity | None = None,
    ) -> list[ReadOutcome]:
        """Read at most ``BATCH`` records, our own or somebody else's. Never straight to where they
        will be used: a transfer that was given up may go on there, after everything was verified.
        """
        again = _repeated(keys)  # of which the store would answer only one
        if again:
            return self._get_in_turns(keys, epoch, into, of, again)
        outcomes: list[ReadOutcome] = []
        for some in portions([data.nbytes for data in into]):
            outcomes += self._get(keys[some], epoch, into[some], of)
        return outcomes

    def _get(
        self, keys: Sequence[Key], epoch: int, into: Sequence[Buffer], of: Identity | None
    ) -> list[ReadOutcome]:
        """One call of the store."""
        names = [self.name(key, epoch, of) for key in keys]
        sizes = [data.nbytes for data in into]
        outcomes = []
        with self._payload_buffers.lend([*sizes, *[HEADER_STEP] * len(sizes)]) as lent:
            payloads, headers = lent.parts[: len(sizes)], lent.parts[len(sizes) :]
            codes = self._store.batch_get_into_multi_buffers(names, *_parts(headers, payloads))
            self._payload_buffers.ended(lent, codes, ABSENT)
            for n, code in enumerate(_checked(codes)):
                if code != HEADER_BYTES + sizes[n]:
                    outcomes.append(self._failed(names[n], code, sizes[n]))
                    continue
                np.copyto(into[n], payloads[n])
                header = headers[n][:HEADER_BYTES].tobytes()
                good = verify(header, of or self._identity, keys[n], epoch, into[n])
                outcomes.append(ReadOutcome.OK if good else ReadOutcome.CORRUPT)
        return outcomes

    def _get_in_turns(
        self,
        keys: Sequence[Key],
        epoch: int,
        into: Sequence[Buffer],
        of: Identity | None,
        again: Sequence[int],
    ) -> list[ReadOutcome]:
        """First what stands there for the first time, then the rest (``again``)."""
        outcomes = [ReadOutcome.MISS] * len(keys)
        for turn in (sorted(set(range(len(keys))).difference(again)), again):
            found = self.get([keys[n] for n in turn], epoch, [into[n] for n in turn], of)
            for n, outcome in zip(turn, found, strict=True):
                outcomes[n] = outcome
        return outcomes

    def remove(self, keys: Sequence[Key], epoch: int) -> None:
        """Remove records, also those that somebody reads."""
        names = [self.name(key, epoch) for key in keys]
        for first in range(0, len(names), BATCH):
            _checked(self._store.batch_remove(names[first : first + BATCH], True))

    # -- documents ---------------------------------------------------------------------------

    def documents(self, names: Sequence[str]) -> list[bytes | None]:
        """Small objects, under names of any kind: ``None`` for what is not there, nothing for what
        cannot be read now or is no document."""
        found: list[bytes | None] = []
        for name, code in zip(names, self._exist(list(names)), strict=True):
            if code != 1:
                found.append(None)
                continue
            [size] = _checked([self._store.get_size(name)])
            found.append(self._store.get(name) if 0 < size <= DOCUMENT_BYTES_MAX else b"")
        return found

    def have_documents(self, names: Sequence[str]) -> list[bool]:
        """Which of these are there."""
        return [code == 1 for code in self._exist(list(names))]

    def put_document(self, name: str, content: bytes, *, is_pinned: bool) -> bool:
        """Store a small object; if pinned it is never evicted. False if there is no room for it;
        one that is there already stays as it is, and nothing is said of that."""
        [code] = _checked([self._store.put(name, content, _placed(is_pinned))])
        return bool(code == 0)

    # -- inside ------------------------------------------------------------------------------

    def _answers(self) -> bool:
        """Whether the master does. It is asked: the client believes in one that hangs."""
        try:
            self._exist([self.name(b"", 0)])
        except TierIoError:
            return False
        return True

    def _exist(self, names: list[str]) -> list[int]:
        return _checked(self._store.batch_is_exist(names))

    def _failed(self, name: str, code: int, payload_bytes: int) -> ReadOutcome:
        """What it means that a record did not come."""
        if code in ABSENT:
            return ReadOutcome.MISS
        size = self._store.get_size(name)
        if size >= 0 and size != HEADER_BYTES + payload_bytes:
            return ReadOutcome.CORRUPT
        return ReadOutcome.MISS if size == NO_SUCH_OBJECT else ReadOutcome.BUSY

    # -- memory ------------------------------------------------------------------------------

    def _register(self, address: int, nbytes: int) -> None:
        code = self._store.register_buffer(address, nbytes)
        if code != 0:
            raise TierIoError(f"the store does not take {nbytes} bytes of memory (code {code})")

    def _is_known(self, buffer: Buffer) -> bool:
        """Whether the store may take a record from where it lies: it was registered at the start.
        Others are copied into a room."""
        return buffer.ctypes.data in self._memory


def _joined(settings: MooncakeSettings) -> Any:
    """A client of the store. Whether anybody answers is tried before: Mooncake would try for a
    minute, and no Python thread of the process would run meanwhile."""
    for address in (settings.master, urlsplit(settings.metadata).netloc):
        if address and not _is_reachable(address):
            raise TierIoError(f"nobody answers at {address}, where a Mooncake master should be")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(CALL_TIMEOUT_MS))
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise TierIoError(f"Mooncake cannot be used: {error}") from error
    code = store.setup(
        settings.host or _own_address(settings.master),
        settings.metadata,
        settings.segment_bytes,
        SETUP_BUFFER_BYTES,
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code != 0:
        store.close()
        raise TierIoError(f"cannot join the Mooncake store at {settings.master} (code {code})")
    return store


def _placed(is_pinned: bool) -> Any:
    config = importlib.import_module("mooncake.store").ReplicateConfig()
    config.with_hard_pin = is_pinned
    config.replica_num = DOCUMENT_COPIES  # in different memories, as far as there are so many
    return config


def _is_reachable(address: str) -> bool:
    """Whether something takes connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _own_address(master: str) -> str:
    """The address of this machine on the way to the master."""
    host, _, port = master.rpartition(":")
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, int(port), type=2)
        with socket.socket(family, kind) as way:
            way.connect(address)  # of a datagram socket: nothing is sent
            return str(way.getsockname()[0])
    except OSError as error:
        raise TierIoError(f"there is no way to the Mooncake master at {master}: {error}") from error


def _parts(
    headers: Sequence[Buffer], payloads: Sequence[Buffer]
) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of header and payload of each record."""
    pairs = list(zip(headers, payloads, strict=True))
    addresses = [[header.ctypes.data, payload.ctypes.data] for header, payload in pairs]
    return addresses, [[HEADER_BYTES, payload.nbytes] for payload in payloads]


def _repeated(keys: Sequence[Key]) -> list[int]:
    """Where a key stands that has stood before."""
    first: dict[Key, int] = {}
    return [n for n, key in enumerate(keys) if first.setdefault(key, n) != n]


def _checked(codes: list[int]) -> list[int]:
    """The codes of a call. Raises ``TierIoError`` if the master did not answer."""
    if any(code in MASTER_AWAY for code in codes):
        raise TierIoError("the Mooncake master does not answer")
    return codes

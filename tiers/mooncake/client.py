"""Blocking calls to a Mooncake store: memory, keys and error codes. Any thread may call.

A record is one object of the store: a header (``record``), followed by the payload. The store
accesses both in place (``..._multi_buffers``), so a payload in a slot is written without a copy.
Payloads are read through ``BounceBuffers``, and headers are read and written through them: a call
that Mooncake has abandoned may continue to move bytes.

The codes are those of ``ErrorCode`` in mooncake-store/include/types.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tiers.base import Buffer, Key, ReadOutcome, TierIoError, WriteOutcome
from tiers.mooncake.bounce_buffers import BUFFER_BYTES, BounceBuffers, portions
from tiers.record import HEADER_BYTES, Identity, seal, verify

CALL_RECORDS_MAX = 64
"""Maximum number of records in one call of the store."""
HEADER_STEP = 128
HEADERS_BYTES = CALL_RECORDS_MAX * HEADER_STEP
CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_MS = 4000
"""Mooncake's timeout for calls of its master. The default is 30 s."""
REGISTER_TIMEOUT_S = 30.0
"""Time for which a client that starts tries to register its memory. Mooncake gives up after 3 s
each time if its metadata server does not answer, which was seen to last up to 28 s."""
REGISTER_AGAIN_S = 0.5
"""Time between two attempts."""
REGISTER_WAITS_S = 2.5
"""An attempt that lasts longer has probably waited for the metadata server."""
NO_METADATA_SERVER = "P2PHANDSHAKE"
SETUP_BUFFER_BYTES = 16 << 20
"""Memory that the store allocates for copies; kvtiers needs none."""

NO_SPACE = -200
NO_SUCH_OBJECT = -704
NOT_READY = -703
MASTER_AWAY = (-900, -901)
"""The codes if the master is gone, and if it did not answer in time."""
HEALTHY = 0
ABSENT = (NO_SUCH_OBJECT, NOT_READY)
EXISTS = -705
NOT_TAKEN = (NO_SPACE, EXISTS)
DOCUMENT_BYTES_MAX = 2 << 20
DOCUMENT_COPIES = 3


@dataclass(frozen=True)
class MooncakeSettings:
    """``master`` is ``host:port``, ``metadata`` a URL or ``P2PHANDSHAKE``. ``segment_bytes`` is how
    much of this process's memory the store may use. ``host`` is the address at which others reach
    this machine ("": determine it). ``device`` are RDMA devices, separated by commas ("": all)."""

    master: str
    metadata: str
    segment_bytes: int = 0
    protocol: str = "tcp"
    device: str = ""
    host: str = ""


class MooncakeClient:
    """A connection to a store. ``memory`` is the address range from which records are usually
    written. It is registered at the start, as are the buffers of ``calls`` reads or writes at a
    time. Raises ``TierIoError`` if the store cannot be joined or does not accept the memory."""

    def __init__(
        self,
        settings: MooncakeSettings,
        identity: Identity,
        memory: range | None,
        *,
        calls: int = 0,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._memory = memory or range(0)
        self._store = join_store(settings)
        about = (settings.protocol, self._register, self._store.unregister_buffer)
        self._payload_buffers = BounceBuffers(*about, BUFFER_BYTES + HEADERS_BYTES)
        self._header_buffers = BounceBuffers(*about, HEADERS_BYTES)
        try:
            self._register_all(calls)
        except BaseException:  # the client has threads, which would continue
            self.close()
            raise

    @property
    def is_healthy(self) -> bool:
        """True if the master answers, as far as the client knows."""
        return bool(self._store.health_check() == HEALTHY)

    def close(self) -> None:
        """Leave the store. Records in this process's segment are lost for all engines.

        If the master does not answer, closing the client takes 15 s, during which no other Python
        thread runs, because Mooncake holds the GIL; its destructor does the same. So in that case
        the client is kept until the process ends, which also leaves the store.
        """
        if _is_reachable(self._settings.master) and self._answers():
            self._store.close()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    # -- records -----------------------------------------------------------------------------

    def name(self, key: Key, epoch: int, of: Identity | None = None) -> str:
        """Return the name of a record's object. It contains namespace, epoch and rank, so an engine
        finds records of others only if it knows their identity (``of``)."""
        namespace, rank = of or self._identity
        return f"kvtiers/{namespace.hex()}/{epoch:x}/{rank}/{key.hex()}"

    def present(self, keys: Sequence[Key], epoch: int, of: Identity | None = None) -> list[bool]:
        """Return which records of this engine, or of another identity, are in the store."""
        return [code == 1 for code in self._exist([self.name(key, epoch, of) for key in keys])]

    def put(self, keys: Sequence[Key], epoch: int, data: Sequence[Buffer]) -> list[WriteOutcome]:
        """Store at most ``CALL_RECORDS_MAX`` records with distinct keys. Existing records are not
        changed."""
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
            for part, n in zip(headers.parts, fresh, strict=True):
                sealed = seal(self._identity, keys[n], epoch, data[n], data[n].nbytes)
                part[:HEADER_BYTES] = np.frombuffer(sealed, np.uint8)
            for part, n in zip(copies.parts, outside, strict=True):
                np.copyto(part, buffers[n])
                buffers[n] = part
            codes = self._store.batch_put_from_multi_buffers(
                [names[n] for n in fresh], *_parts(headers.parts, buffers)
            )
            self._header_buffers.note_ended(headers, codes, NOT_TAKEN)
            self._payload_buffers.note_ended(copies, codes, NOT_TAKEN)
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
        """Read at most ``CALL_RECORDS_MAX`` records, of this engine or another identity. They are
        never read directly into ``into``: an abandoned transfer may continue to write after the
        payload was verified."""
        again = _repeated(keys)  # the store would return each key only once
        if again:
            return self._get_in_turns(keys, epoch, into, of, again)
        outcomes: list[ReadOutcome] = []
        for some in portions([data.nbytes for data in into]):
            outcomes += self._get(keys[some], epoch, into[some], of)
        return outcomes

    def _get(
        self, keys: Sequence[Key], epoch: int, into: Sequence[Buffer], of: Identity | None
    ) -> list[ReadOutcome]:
        """Read with one call of the store."""
        names = [self.name(key, epoch, of) for key in keys]
        sizes = [data.nbytes for data in into]
        outcomes = []
        with self._payload_buffers.lend([*sizes, *[HEADER_STEP] * len(sizes)]) as lent:
            payloads, headers = lent.parts[: len(sizes)], lent.parts[len(sizes) :]
            codes = self._store.batch_get_into_multi_buffers(names, *_parts(headers, payloads))
            self._payload_buffers.note_ended(lent, codes, ABSENT)
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
        """Read the first occurrence of each key, then the repeated ones (``again``)."""
        outcomes = [ReadOutcome.MISS] * len(keys)
        for turn in (sorted(set(range(len(keys))).difference(again)), again):
            found = self.get([keys[n] for n in turn], epoch, [into[n] for n in turn], of)
            for n, outcome in zip(turn, found, strict=True):
                outcomes[n] = outcome
        return outcomes

    def remove(self, keys: Sequence[Key], epoch: int) -> None:
        """Remove records, even while they are being read."""
        names = [self.name(key, epoch) for key in keys]
        for first in range(0, len(names), CALL_RECORDS_MAX):
            _checked(self._store.batch_remove(names[first : first + CALL_RECORDS_MAX], True))

    # -- documents ---------------------------------------------------------------------------

    def documents(self, names: Sequence[str]) -> list[bytes | None]:
        """Read small objects by name. A result is ``None`` if there is no such object, and empty if
        the object cannot be read now or is too large to be a document."""
        found: list[bytes | None] = []
        for name, code in zip(names, self._exist(list(names)), strict=True):
            if code != 1:
                found.append(None)
                continue
            [size] = _checked([self._store.get_size(name)])
            found.append(self._store.get(name) if 0 < size <= DOCUMENT_BYTES_MAX else b"")
        return found

    def have_documents(self, names: Sequence[str]) -> list[bool]:
        """Return which of these documents exist."""
        return [code == 1 for code in self._exist(list(names))]

    def put_document(self, name: str, content: bytes, *, is_pinned: bool) -> bool:
        """Store a small object. A pinned object is never evicted. Returns False if there is no
        space. An existing object is not changed, and the call still returns True."""
        [code] = _checked([self._store.put(name, content, _placed(is_pinned))])
        return bool(code == 0)

    # -- inside ------------------------------------------------------------------------------

    def _answers(self) -> bool:
        """Return True if the master answers now. The client itself does not detect a master that
        hangs."""
        try:
            self._exist([self.name(b"", 0)])
        except TierIoError:
            return False
        return True

    def _exist(self, names: list[str]) -> list[int]:
        return _checked(self._store.batch_is_exist(names))

    def _failed(self, name: str, code: int, payload_bytes: int) -> ReadOutcome:
        """Return the outcome of a record that could not be read."""
        if code in ABSENT:
            return ReadOutcome.MISS
        size = self._store.get_size(name)
        if size >= 0 and size != HEADER_BYTES + payload_bytes:
            return ReadOutcome.CORRUPT
        return ReadOutcome.MISS if size == NO_SUCH_OBJECT else ReadOutcome.BUSY

    # -- memory ------------------------------------------------------------------------------

    def _register_all(self, calls: int) -> None:
        """Register everything that ``calls`` calls at a time need. Tries again for some time if the
        metadata server does not answer, as may happen while several clients start."""
        deadline = time.monotonic() + REGISTER_TIMEOUT_S

        def register(address: int, nbytes: int) -> None:
            while True:
                start = time.monotonic()
                try:
                    self._register(address, nbytes)
                except TierIoError as error:
                    waited = self._waited_for_metadata(start)
                    if not waited or time.monotonic() + REGISTER_AGAIN_S > deadline:
                        raise TierIoError(f"{error}{self._advice(waited)}") from error
                else:
                    return
                # a failed registration can leave a part, with which the next one would collide
                self._store.unregister_buffer(address)
                time.sleep(REGISTER_AGAIN_S)

        if self._memory:
            register(self._memory.start, len(self._memory))
        for _ in range(calls):
            self._payload_buffers.reserve(register)
            self._header_buffers.reserve(register)

    def _waited_for_metadata(self, start: float) -> bool:
        """Return True if a failed registration, which began at ``start``, may succeed once the
        metadata server answers. Mooncake's code is the same for all errors, such as a limit on
        locked memory."""
        metadata = self._settings.metadata
        if metadata == NO_METADATA_SERVER:
            return False
        return time.monotonic() - start > REGISTER_WAITS_S or not _answers_http(metadata)

    def _advice(self, waited: bool) -> str:
        """Return advice for the case that memory cannot be registered."""
        if not waited:
            return ". See the lines that Mooncake has logged"
        metadata = self._settings.metadata
        return (
            f". Probably the metadata server at {metadata} does not answer. Check it, or set "
            f'"metadata": "{NO_METADATA_SERVER}" in all servers, which then need none'
        )

    def _register(self, address: int, nbytes: int) -> None:
        code = self._store.register_buffer(address, nbytes)
        if code != 0:
            raise TierIoError(f"the store does not accept {nbytes} bytes of memory (code {code})")

    def _is_known(self, buffer: Buffer) -> bool:
        """Return True if the store can read a record in place, because its memory was registered at
        the start. Other records are copied into a bounce buffer."""
        return buffer.ctypes.data in self._memory


def join_store(settings: MooncakeSettings) -> Any:
    """Return Mooncake's own client, which has joined the store. Raises ``TierIoError``.

    First checks that the master is reachable: Mooncake would try for a minute, during which no
    other Python thread runs.
    """
    for address in (settings.master, urlsplit(settings.metadata).netloc):
        if address and not _is_reachable(address):
            raise TierIoError(f"nothing listens at {address}, where a Mooncake master should be")
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
    config.replica_num = DOCUMENT_COPIES  # in different segments, as far as possible
    return config


def _is_reachable(address: str) -> bool:
    """Return True if ``host:port`` accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _answers_http(url: str) -> bool:
    """Return True if a server answers this URL now, whatever it answers."""
    parts = urlsplit(url)
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kind:
        return False
    try:
        connection = kind[parts.scheme](parts.netloc, timeout=CONNECT_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", parts.path)
            connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    return True


def _own_address(master: str) -> str:
    """Return the address of this machine on the route to the master."""
    host, _, port = master.rpartition(":")
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, int(port), type=2)
        with socket.socket(family, kind) as way:
            way.connect(address)  # connecting a datagram socket sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise TierIoError(
            f"there is no route to the Mooncake master at {master}: {error}"
        ) from error


def _parts(
    headers: Sequence[Buffer], payloads: Sequence[Buffer]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and sizes of header and payload of each record."""
    pairs = list(zip(headers, payloads, strict=True))
    addresses = [[header.ctypes.data, payload.ctypes.data] for header, payload in pairs]
    return addresses, [[HEADER_BYTES, payload.nbytes] for payload in payloads]


def _repeated(keys: Sequence[Key]) -> list[int]:
    """Return the positions of keys that occur earlier in the list, too."""
    first: dict[Key, int] = {}
    return [n for n, key in enumerate(keys) if first.setdefault(key, n) != n]


def _checked(codes: list[int]) -> list[int]:
    """Return the codes unchanged. Raises ``TierIoError`` if the master did not answer."""
    if any(code in MASTER_AWAY for code in codes):
        raise TierIoError("the Mooncake master does not answer")
    return codes

"""Records in one file, to move them to another disk or machine.

    offset  bytes  a file
    0       8      magic ``KVTEXP01``
    8              frames, one after the other

    0       4      a frame: magic ``KVTF``
    4       1      kind: ``M`` the owner, ``S`` start of a rank, ``R`` a record, ``E`` the end
    5       3      zero
    8       8      length of the body, little-endian
    16      8      xxh3-64 of these 16 bytes
    24      16     xxh3-128 of these 24 bytes and the body
    40             body: JSON (M, S, E), or for a record: length of the key (2 bytes), time of last
                   use in ns (8), key, payload

Payloads are the model's KV bytes, neither compressed nor encrypted. If a body is damaged, only its
frame is lost. After a damaged frame header the next frame cannot be found, so the rest is lost. A
file without an end frame belongs to an export that was interrupted.

This module knows nothing about tiers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash

from tiers.base import Buffer, Key
from tiers.io.threads import DaemonExecutor

MAGIC = b"KVTEXP01"
BODY_BYTES_MAX = (1 << 30) + (1 << 16)
ABOUT_BYTES_MAX = 1 << 20
"""Larger than any JSON document that kvtiers writes."""
AHEAD_BYTES = 12 << 20
_FRAME = b"KVTF"
_HEAD = struct.Struct("<4sc3xQ")
_RECORD = struct.Struct("<HQ")
_SUM_BYTES, _DIGEST_BYTES = 8, 16
ARCHIVE_HEAD_BYTES = _HEAD.size + _SUM_BYTES + _DIGEST_BYTES


class PortableError(Exception):
    """Raised if the file cannot be read any further. The message says where and why."""


class Record(NamedTuple):
    """One record. ``use_ns`` is 0 if its last use is not known."""

    key: Key
    use_ns: int
    payload: Buffer


class Frame(NamedTuple):
    """A frame of the file: ``about`` for JSON, ``record`` for a record, neither if the body is
    damaged. ``at`` is the offset of the frame, ``size_bytes`` its whole length."""

    kind: str
    at: int
    size_bytes: int
    about: dict[str, Any] | None = None
    record: Record | None = None


def about_frame(kind: str, about: dict[str, Any]) -> list[bytes | memoryview]:
    """A frame with JSON content, in parts to write one after the other."""
    return _frame(kind, json.dumps(about, sort_keys=True).encode())


def record_frame(record: Record) -> list[bytes | memoryview]:
    """The frame of a record, in parts to write one after the other. The last part is the payload
    itself, not a copy."""
    front = _RECORD.pack(len(record.key), record.use_ns) + record.key
    return _frame("R", front, record.payload.data)


def _frame(kind: str, *body: bytes | memoryview) -> list[bytes | memoryview]:
    head = _HEAD.pack(_FRAME, kind.encode("ascii"), sum(map(len, body)))
    head += xxhash.xxh3_64(head).digest()
    digest = xxhash.xxh3_128(head)
    for part in body:
        digest.update(part)
    return [head + digest.digest(), *body]


def read_frames(file: IO[bytes]) -> Iterator[Frame]:
    """Iterate over all frames up to the end frame. Raises ``PortableError`` at a point from which
    it cannot continue."""
    if file.read(len(MAGIC)) != MAGIC:
        raise PortableError("it is not an export of kvtiers: it begins with different bytes")
    at = len(MAGIC)
    while True:
        head = file.read(ARCHIVE_HEAD_BYTES)
        if len(head) < ARCHIVE_HEAD_BYTES:
            raise PortableError(f"it ends at byte {at + len(head)}, before its end was written")
        magic, kind, size = _HEAD.unpack_from(head)
        sealed, digest = head[: _HEAD.size + _SUM_BYTES], head[-_DIGEST_BYTES:]
        fits = xxhash.xxh3_64(head[: _HEAD.size]).digest() == sealed[_HEAD.size :]
        if magic != _FRAME or not fits or size > BODY_BYTES_MAX:
            raise PortableError(f"it is damaged at byte {at}: the frames after it cannot be found")
        body = np.empty(size, np.uint8)
        if _fill(file, body) < size:
            raise PortableError(f"it ends within the frame at byte {at}")
        found = xxhash.xxh3_128(sealed)
        found.update(body.data)
        frame = Frame(kind.decode("latin-1"), at, ARCHIVE_HEAD_BYTES + size)
        at += frame.size_bytes
        yield _with_content(frame, body) if found.digest() == digest else frame
        if frame.kind == "E":
            return


def read_ahead(frames: Iterator[Frame]) -> Iterator[Frame]:
    """Yield the same frames, and raise the same errors. A daemon thread reads and verifies up to
    two times ``AHEAD_BYTES`` (and a frame each time) in advance."""
    batches = _batches(frames)
    executor = DaemonExecutor("kvtiers-archive")
    try:
        following = executor.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = executor.submit(next, batches, None)
            yield from batch
    finally:
        executor.shutdown(wait=False)


def _batches(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    batch: list[Frame] = []
    size_bytes = 0
    try:
        for frame in frames:
            batch.append(frame)
            size_bytes += frame.size_bytes
            if size_bytes >= AHEAD_BYTES:
                yield batch
                batch, size_bytes = [], 0
    except PortableError:
        yield batch
        raise
    yield batch


def _fill(file: IO[bytes], body: Buffer) -> int:
    done = 0
    while done < body.nbytes:
        count = file.readinto(body[done:].data)  # type: ignore[attr-defined]  # all binary files
        if not count:
            break
        done += count
    return done


def _with_content(frame: Frame, body: Buffer) -> Frame:
    """Return the frame with its decoded body. A body that cannot be decoded counts as damaged,
    because a manipulated file can have correct checksums."""
    if frame.kind == "R":
        if body.nbytes < _RECORD.size:
            return frame
        key_bytes, use_ns = _RECORD.unpack_from(body.data)
        start = _RECORD.size + key_bytes
        if start > body.nbytes:
            return frame
        key = body[_RECORD.size : start].tobytes()
        return frame._replace(record=Record(key, use_ns, body[start:]))
    if body.nbytes > ABOUT_BYTES_MAX:
        return frame
    try:
        about = json.loads(body.tobytes())
    except (ValueError, RecursionError):
        return frame
    return frame._replace(about=about if isinstance(about, dict) else None)

"""The header of a record on disk: the record's key and size, its owner, and a tag over header, key
and payload.

A header is ``HEADER_BYTES`` long, little-endian, without padding between fields:

    offset  bytes  field
    0       4      magic ``KVTR``
    4       1      version of this format
    5       1      flags: 1 compressed, 2 encrypted
    6       2      rank that wrote it
    8       4      group, as packed into the end of the key
    12      2      length of the key
    14      2      zero
    16      8      weights epoch
    24      8      payload length in bytes, as the caller gave it
    32      8      stored length in bytes (differs from the payload's when compressed)
    40      16     namespace
    56      12     nonce (zero unless encrypted)
    68      4      id of the encryption key (zero unless encrypted)
    72      16     tag

In a record file the key follows the header. An index stores the key separately.

The tag of an unencrypted record is xxh3-128 over ``header[:72] + key + payload``. It detects a
flipped bit, a torn or truncated payload, and an intact record of another key, namespace, rank or
epoch. It does not detect a deliberate forgery. Encryption does (``tiers.io.codec``), with a tag
from AES-GCM.

Outside the header, a tier keeps a record's time of last use: strictly increasing nanoseconds since
1970, which both order and date records. If the system clock is set back, each time is the previous
one plus one, so the order is kept. Early versions stored small counters instead, which give an
order but no age.

This module knows nothing about files.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash

from tiers.base import Buffer

MAGIC = b"KVTR"
VERSION = 1
COMPRESSED = 1
ENCRYPTED = 2

NAMESPACE_BYTES = 16
NO_NAMESPACE = bytes(NAMESPACE_BYTES)
TAG_BYTES = 16
NONCE_BYTES = 12
KEY_ID_BYTES = 4
KEY_BYTES_MAX = 511
"""LMDB's limit for a key. It applies to every tier, so that records can move between tiers."""

_PREFIX = struct.Struct("<4sBBHIHHQQQ16s12s4s")
PREFIX_BYTES = _PREFIX.size
HEADER_BYTES = PREFIX_BYTES + TAG_BYTES
"""The size of the header that ``seal`` makes."""
DATED_FROM_NS = 10**18
"""A smaller time of use (before September 2001) is a counter and not a time."""
_NO_NONCE = bytes(NONCE_BYTES)
_NO_KEY_ID = bytes(KEY_ID_BYTES)


class RecordError(ValueError):
    """Raised if the bytes are not a header of this format."""


class Identity(NamedTuple):
    """The owner of the records in a tier. ``namespace`` has 16 bytes."""

    namespace: bytes = NO_NAMESPACE
    rank: int = 0


class Header(NamedTuple):
    """A decoded header; the fields are in the order of the format."""

    version: int
    flags: int
    rank: int
    group: int
    key_bytes: int
    epoch: int
    payload_bytes: int
    stored_bytes: int
    namespace: bytes
    nonce: bytes
    key_id: bytes
    tag: bytes


def group_of_key(key: bytes) -> int:
    """Return the group id that vLLM packs into the last four bytes of a key, big-endian (0 if the
    key is shorter).

    It is informational: the tag covers the whole key anyway.
    """
    return int.from_bytes(key[-4:], "big") if len(key) > 4 else 0


def prefix(
    identity: Identity,
    key: bytes,
    epoch: int,
    payload_bytes: int,
    *,
    stored_bytes: int | None = None,
    flags: int = 0,
    nonce: bytes = _NO_NONCE,
    key_id: bytes = _NO_KEY_ID,
) -> bytes:
    """Return the header without its tag. The tag covers these bytes, the key and the payload."""
    return _PREFIX.pack(
        MAGIC,
        VERSION,
        flags,
        identity.rank,
        group_of_key(key),
        len(key),
        0,
        epoch,
        payload_bytes,
        payload_bytes if stored_bytes is None else stored_bytes,
        identity.namespace,
        nonce,
        key_id,
    )


def tag_of(prefix_bytes: bytes, key: bytes, payload: Any) -> bytes:
    """Compute xxh3-128 over prefix, key and payload (contiguous). Releases the GIL for large
    payloads."""
    digest = xxhash.xxh3_128(prefix_bytes)
    digest.update(key)
    digest.update(payload)
    return bytes(digest.digest())


def seal(identity: Identity, key: bytes, epoch: int, payload: Any, payload_bytes: int) -> bytes:
    """Return the complete header of an unencrypted record."""
    head = prefix(identity, key, epoch, payload_bytes)
    return head + tag_of(head, key, payload)


def verify(header: bytes, identity: Identity, key: bytes, epoch: int, payload: Any) -> bool:
    """Return True if ``payload`` is exactly what was sealed for this key, identity and epoch.

    Verify the bytes that will be used, after the last copy.
    """
    head = header[:PREFIX_BYTES]
    if len(header) != HEADER_BYTES:
        return False
    expected = prefix(
        identity,
        key,
        epoch,
        len(payload),
        stored_bytes=stored_bytes_of(header),
        flags=flags_of(header) & COMPRESSED,
    )
    return head == expected and header[PREFIX_BYTES:] == tag_of(head, key, payload)


def flags_of(header: bytes) -> int:
    """Return the flags of a header; 0 if the record is stored unchanged."""
    return header[5]


def stored_bytes_of(header: bytes) -> int:
    """Return the stored length of a header."""
    return int.from_bytes(header[32:40], "little")


def parse(header: bytes) -> Header:
    """Decode a header. Raises ``RecordError`` if it is not one of this format."""
    if len(header) != HEADER_BYTES:
        raise RecordError(f"a header has {HEADER_BYTES} bytes, but this one has {len(header)}")
    magic, version, *fields, key_id = _PREFIX.unpack_from(header)
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"magic {magic!r} version {version}, expected {MAGIC!r} {VERSION}")
    flags, rank, group, key_bytes, _zero, epoch, payload_bytes, stored_bytes = fields[:8]
    namespace, nonce = fields[8:]
    return Header(
        version,
        flags,
        rank,
        group,
        key_bytes,
        epoch,
        payload_bytes,
        stored_bytes,
        namespace,
        nonce,
        key_id,
        header[PREFIX_BYTES:],
    )


def check_key(key: bytes) -> None:
    """Raise ``ValueError`` for a key that no tier can store."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, but this one has {len(key)}")


def check_payload(payload_bytes: int) -> None:
    """Raise ``ValueError`` for a payload that no tier can store."""
    if payload_bytes < 1:
        raise ValueError("a payload has at least one byte")


def check_records(keys: Sequence[bytes], payloads: Sequence[Buffer]) -> None:
    """Raise ``ValueError`` if a tier could not store one of the records, or if the lists have
    different lengths."""
    for key, data in zip(keys, payloads, strict=True):
        check_key(key)
        check_payload(data.nbytes)


def check_identity(identity: Identity) -> None:
    """Raise ``ValueError`` for an identity that does not fit into a header."""
    if len(identity.namespace) != NAMESPACE_BYTES:
        raise ValueError(
            f"a namespace has {NAMESPACE_BYTES} bytes, but this one has {len(identity.namespace)}"
        )
    if not 0 <= identity.rank < 1 << 16:
        raise ValueError(f"a rank must be in 0..65535, but this one is {identity.rank}")


class UseClock:
    """Hands out times of use, each greater than all earlier ones."""

    def __init__(self, first: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``first`` must be greater than every time of use in the tier."""
        self._next = first
        self._now_ns = now_ns

    def take(self, count: int) -> range:
        """Return ``count`` consecutive times, for records in the order of their use."""
        first = max(self._next, self._now_ns())
        self._next = first + count
        return range(first, self._next)

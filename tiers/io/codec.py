"""Lossless compression and encryption of payloads between slot and disk.

Both are off by default. Neither ever makes a record longer: a payload that compression does not
shrink is stored unchanged, and the tag of an encrypted record is in its header.

Compression separates the high and low bytes of 16-bit numbers (the exponents of a KV cache repeat,
its mantissas do not) and passes them to zstd. If it saves less than ``SAVING_MIN`` on average over
``TRIAL_RECORDS``, it pauses for ``PAUSE_RECORDS``.

Encryption is AES-256-GCM with a random nonce per record and with header and key as associated data.
A record that was tampered with, moved to another key or copied from another namespace cannot be
decrypted. The key in the file is never used directly; each namespace gets a key derived by
HKDF-SHA256. A key file has one key of 64 hexadecimal digits per line: the first one encrypts, the
others only decrypt (rotation). Random nonces allow 2**32 records per key: rotate before that.

Thread-safe: all state is either per thread or a plain counter whose races are harmless.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tiers.base import ALIGNMENT, Buffer, Key, TierIoError
from tiers.io.direct_io import Scratch, pages_for
from tiers.record import (
    COMPRESSED,
    ENCRYPTED,
    KEY_ID_BYTES,
    NONCE_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
    Identity,
    RecordError,
    flags_of,
    parse,
    prefix,
    seal,
    tag_of,
    verify,
)

MASTER_KEY_BYTES = 32
SAVING_MIN = 0.05
TRIAL_RECORDS = 16
PAUSE_RECORDS = 1024
_LEVEL = 1


_KEY = re.compile(rb"[0-9A-Fa-f]{%d}" % (2 * MASTER_KEY_BYTES))


class KeyRing:
    """The keys of one namespace, by id. The first one encrypts."""

    def __init__(self, masters: list[bytes], namespace: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        derived = [_derive(master, namespace) for master in masters]
        self.current_id = _key_id(derived[0])
        self.ciphers = {_key_id(key): AESGCM(key) for key in derived}

    @classmethod
    def load(cls, path: Path, namespace: bytes) -> KeyRing:
        """Read a key file. Raises ``TierIoError``."""
        try:
            masters = read_key_file(path)
        except KeyFileError as error:
            raise TierIoError(f"the key file {path} {error}. {error.fix}") from error
        try:
            return cls(masters, namespace)
        except ImportError as error:
            raise TierIoError(
                "encryption needs the package cryptography. Run: pip install cryptography"
            ) from error


class KeyFileError(ValueError):
    """A key file cannot be used. ``fix`` says what to do; no part of the file is shown."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def read_key_file(path: Path) -> list[bytes]:
    """Return the keys in a file, which must be readable only by this user, its owner. Raises
    ``KeyFileError``."""
    make = f"Make one: (umask 077; openssl rand -hex {MASTER_KEY_BYTES} > {path})"
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError("is not a regular file", "Give the file with the key.")
        content = path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot be read: {error.strerror}", make) from error
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        what = f"can be read by others (mode {mode:04o})"
        raise KeyFileError(what, f"Run: chmod 600 {path}")
    if found.st_uid != os.geteuid():
        what = f"belongs to uid {found.st_uid}, but this process runs as uid {os.geteuid()}"
        raise KeyFileError(what, "Give it to the user of this process.")
    lines = content.split()
    if not lines or not all(map(_KEY.fullmatch, lines)):
        what = f"needs one or more lines of {2 * MASTER_KEY_BYTES} hexadecimal digits"
        raise KeyFileError(what, make)
    return [bytes.fromhex(line.decode()) for line in lines]


def _derive(master: bytes, namespace: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"kvtiers record " + namespace
    return HKDF(SHA256(), MASTER_KEY_BYTES, salt=None, info=info).derive(master)


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"kvtiers key id").digest()


class Codec:
    """Encodes and decodes the records of one identity. Blocks; used in I/O threads."""

    def __init__(self, identity: Identity, *, keys: KeyRing | None, compress: bool) -> None:
        self._identity = identity
        self._keys = keys
        self._planes = BytePlanes() if compress else None

    @property
    def is_plain(self) -> bool:
        """True if payloads are always stored unchanged."""
        return self._keys is None and self._planes is None

    @property
    def key_ids(self) -> frozenset[bytes]:
        """The ids of the available keys. If there are none, only unencrypted records can be
        read."""
        return frozenset(self._keys.ciphers) if self._keys else frozenset()

    @staticmethod
    def scratch_bytes(payload_bytes: int) -> int:
        """Return the bytes of aligned memory that encoding or decoding one record needs."""
        return pages_for(payload_bytes + TAG_BYTES) * ALIGNMENT

    def encode(
        self, key: Key, epoch: int, payload: Buffer, scratch: Buffer
    ) -> tuple[bytes, Buffer]:
        """Return the header and the stored bytes, which are either in ``scratch`` or ``payload``
        itself."""
        small = self._planes.compress(payload) if self._planes else None
        if self._keys is not None:
            return self._encrypt(key, epoch, payload, small, scratch)
        if small is None:
            return seal(self._identity, key, epoch, payload, payload.nbytes), payload
        head = prefix(
            self._identity, key, epoch, payload.nbytes, stored_bytes=len(small), flags=COMPRESSED
        )
        scratch[: len(small)] = np.frombuffer(small, np.uint8)
        return head + tag_of(head, key, payload), scratch[: len(small)]

    def _encrypt(
        self, key: Key, epoch: int, payload: Buffer, small: bytes | None, scratch: Buffer
    ) -> tuple[bytes, Buffer]:
        assert self._keys is not None, "called only if there are keys"
        source = payload.data if small is None else small
        size = payload.nbytes if small is None else len(small)
        nonce = os.urandom(NONCE_BYTES)
        head = prefix(
            self._identity,
            key,
            epoch,
            payload.nbytes,
            stored_bytes=size,
            flags=ENCRYPTED | (COMPRESSED if small is not None else 0),
            nonce=nonce,
            key_id=self._keys.current_id,
        )
        cipher = self._keys.ciphers[self._keys.current_id]
        cipher.encrypt_into(nonce, source, head + key, scratch[: size + TAG_BYTES].data)
        return head + scratch[size : size + TAG_BYTES].tobytes(), scratch[:size]

    def decode(self, header: bytes, key: Key, epoch: int, scratch: Buffer, into: Buffer) -> bool:
        """Fill ``into`` from the stored bytes at the start of ``scratch``. Returns True if they are
        exactly what was encoded for this key, identity and epoch. ``scratch`` has
        ``scratch_bytes``; for a record without flags it is ``into`` itself. It may be changed.
        Never raises."""
        try:
            if self._keys is None and not flags_of(header):
                return verify(header, self._identity, key, epoch, into)
            return self._decode(header, key, epoch, scratch, into)
        except Exception:  # zstd and AES raise many errors for a damaged record
            return False

    def _decode(self, header: bytes, key: Key, epoch: int, scratch: Buffer, into: Buffer) -> bool:
        fields = parse(header)
        size = fields.stored_bytes
        if size > into.nbytes:
            return False
        if bool(fields.flags & ENCRYPTED) != (self._keys is not None):
            return False
        if self._keys is None:
            if fields.flags & COMPRESSED:
                BytePlanes.decompress(scratch[:size], into)
            return verify(header, self._identity, key, epoch, into)
        expected = prefix(
            self._identity,
            key,
            epoch,
            into.nbytes,
            stored_bytes=size,
            flags=fields.flags,
            nonce=fields.nonce,
            key_id=fields.key_id,
        )
        cipher = self._keys.ciphers.get(fields.key_id)
        if cipher is None or expected != header[:PREFIX_BYTES]:
            return False
        scratch[size : size + TAG_BYTES] = np.frombuffer(fields.tag, np.uint8)
        sealed = scratch[: size + TAG_BYTES].data
        if not fields.flags & COMPRESSED:
            cipher.decrypt_into(fields.nonce, sealed, expected + key, into.data)
            return True
        small = cipher.decrypt(fields.nonce, sealed, expected + key)
        BytePlanes.decompress(np.frombuffer(small, np.uint8), into)
        return True


class CodecScratch:
    """Scratch memory for encoded payloads, one part per payload."""

    def __init__(self, codec: Codec, scratch: Scratch, payloads: Sequence[Buffer]) -> None:
        total = sum(codec.scratch_bytes(data.nbytes) for data in payloads)
        self._codec = codec
        self._left = scratch.for_codec(total) if total else scratch.data[:0]

    def take(self, payload_bytes: int) -> Buffer:
        size = self._codec.scratch_bytes(payload_bytes)
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class BytePlanes:
    """Splits bytes into planes for zstd, and pauses while compression saves too little."""

    def __init__(self) -> None:
        import zstandard

        self._zstd = zstandard
        self._local = threading.local()
        self._tried = self._pause = 0
        self._saved = 0.0

    def compress(self, payload: Buffer) -> bytes | None:
        """Return the compressed form, or ``None`` if it saves too little."""
        if self._pause > 0:
            self._pause -= 1
            return None
        if not hasattr(self._local, "compressor"):
            self._local.compressor = self._zstd.ZstdCompressor(level=_LEVEL)
        small: bytes = self._local.compressor.compress(_split(payload))
        saving = 1 - len(small) / payload.nbytes
        self._saved += saving
        self._tried += 1
        if self._tried >= TRIAL_RECORDS:
            if self._saved / self._tried < SAVING_MIN:
                self._pause = PAUSE_RECORDS
            self._tried, self._saved = 0, 0.0
        return small if pages_for(len(small)) < pages_for(payload.nbytes) else None

    @staticmethod
    def decompress(small: Buffer, into: Buffer) -> None:
        """Fill ``into``. Raises ``RecordError`` or zstd's error if the frame does not fit."""
        import zstandard

        if zstandard.frame_content_size(small.data) != into.nbytes:
            raise RecordError("the frame has another length than the payload")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(small.data), np.uint8)
        half = into.nbytes // 2
        np.copyto(into[0 : 2 * half : 2], planes[:half])
        np.copyto(into[1 : 2 * half : 2], planes[half : 2 * half])
        np.copyto(into[2 * half :], planes[2 * half :])


def _split(payload: Buffer) -> Buffer:
    """Return all even bytes, then all odd ones, then the last byte of an odd length."""
    half = payload.nbytes // 2
    planes = np.empty_like(payload)
    np.copyto(planes[:half], payload[0 : 2 * half : 2])
    np.copyto(planes[half : 2 * half], payload[1 : 2 * half : 2])
    np.copyto(planes[2 * half :], payload[2 * half :])
    return planes

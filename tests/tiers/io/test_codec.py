"""Compression and encryption at rest, alone and under the LMDB tier."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
import pytest

from tiers.base import Buffer, ReadOutcome, Tier, TierIoError, WriteOutcome
from tiers.io.codec import PAUSE_RECORDS, TRIAL_RECORDS, BytePlanes, Codec, KeyRing
from tiers.lmdb.tier import LmdbTier
from tiers.record import ENCRYPTED, Identity, flags_of, parse
from tiers.testing import (
    TierContract,
    aligned,
    assert_holds,
    assert_misses,
    fetch,
    key_of,
    payload_of,
    put,
)

ME = Identity(bytes(range(16)), 1)
KEY = key_of(5)
CAPACITY = 24 << 20


def key_file(path: Path, *keys: str) -> str:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return str(path)


def new_key() -> str:
    return secrets.token_hex(32)


def bfloat16_like(count: int) -> Buffer:
    """Normally distributed numbers cut to 16 bits, which resemble a KV cache."""
    numbers = np.random.default_rng(3).normal(size=count).astype(np.float32)
    data = aligned(2 * count)
    data[:] = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return data


def codecs(path: Path) -> dict[str, Codec]:
    ring = KeyRing.load(Path(key_file(path, new_key())), ME.namespace)
    return {
        "plain": Codec(ME, keys=None, compress=False),
        "compressed": Codec(ME, keys=None, compress=True),
        "encrypted": Codec(ME, keys=ring, compress=False),
        "both": Codec(ME, keys=ring, compress=True),
    }


KINDS = ["plain", "compressed", "encrypted", "both"]


def in_room(codec: Codec, stored: Buffer, payload_bytes: int) -> Buffer:
    scratch = np.zeros(codec.scratch_bytes(payload_bytes), np.uint8)
    scratch[: stored.nbytes] = stored
    return scratch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 3, 4096, 50_001, 200_000])
def test_encoded_payloads_decode_to_the_same_bytes(tmp_path: Path, kind: str, length: int) -> None:
    codec = codecs(tmp_path / "keys")[kind]
    payload = bfloat16_like(length // 2 + 1)[:length]
    header, stored = codec.encode(KEY, 3, payload, np.zeros(codec.scratch_bytes(length), np.uint8))
    into = np.zeros(length, np.uint8)
    if flags_of(header):
        scratch = in_room(codec, stored, length)
    else:
        scratch = into
        into[:] = stored
    assert codec.decode(header, KEY, 3, scratch, into)
    assert np.array_equal(into, payload)
    if kind in ("compressed", "both") and length > 10_000:
        assert stored.nbytes < 0.85 * length
    if kind in ("encrypted", "both"):
        assert flags_of(header) & ENCRYPTED
        assert stored.tobytes() not in payload.tobytes()


@pytest.mark.parametrize("kind", ["compressed", "encrypted", "both"])
def test_every_damage_is_detected(tmp_path: Path, kind: str) -> None:
    codec = codecs(tmp_path / "keys")[kind]
    payload = bfloat16_like(5_000)
    size = payload.nbytes
    header, stored = codec.encode(KEY, 3, payload, np.zeros(codec.scratch_bytes(size), np.uint8))
    into = np.zeros(size, np.uint8)
    rng = np.random.default_rng(1)
    for _ in range(300):
        scratch = in_room(codec, stored, size)
        scratch[rng.integers(stored.nbytes)] ^= 1 << rng.integers(8)
        same = codec.decode(header, KEY, 3, scratch, into)
        # A zstd frame has bits without meaning; if only those differ, the payload must be intact.
        assert not same or (kind == "compressed" and np.array_equal(into, payload))
    for bit in range(8 * len(header)):
        raw = bytearray(header)
        raw[bit // 8] ^= 1 << bit % 8
        assert not codec.decode(bytes(raw), KEY, 3, in_room(codec, stored, size), into), bit
    for key, epoch in ((key_of(6), 3), (KEY, 4)):
        assert not codec.decode(header, key, epoch, in_room(codec, stored, size), into)


def test_nonces_never_repeat_and_namespaces_do_not_share_keys(tmp_path: Path) -> None:
    path = Path(key_file(tmp_path / "keys", new_key()))
    mine, other = KeyRing.load(path, ME.namespace), KeyRing.load(path, bytes(16))
    assert not set(mine.ciphers) & set(other.ciphers)
    codec = Codec(ME, keys=mine, compress=False)
    scratch = np.zeros(codec.scratch_bytes(100), np.uint8)
    nonces = {parse(codec.encode(KEY, 0, aligned(100), scratch)[0]).nonce for _ in range(1000)}
    assert len(nonces) == 1000


def test_compression_pauses_when_it_does_not_pay_and_tries_again() -> None:
    planes = BytePlanes()
    noise = np.random.default_rng(1).integers(0, 256, 8192, np.uint8)
    good = bfloat16_like(65_536)
    for _ in range(TRIAL_RECORDS):
        assert planes.compress(noise) is None
    assert planes.compress(good) is None, "compression must have stopped"
    for _ in range(PAUSE_RECORDS - 1):
        planes.compress(good)
    assert planes.compress(good) is not None, "compression must be tried again"


class TestEncryptedAndCompressed(TierContract):
    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        path = folder.with_name("keys")
        if not path.exists():
            key_file(path, new_key())
        options = {"key_file": str(path), "compress": True, "record_bytes": 4096}
        return LmdbTier(folder, capacity_bytes, reserve_bytes=0, **options)


def tier_at(folder: Path, **options: object) -> LmdbTier:
    return LmdbTier(folder / "tier", CAPACITY, **{"reserve_bytes": 0, **options})


async def test_rotation_and_wrong_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The old key still reads; without the right key, or without any key, a record is a miss."""
    old, new = new_key(), new_key()
    keys = [key_of(n) for n in range(6)]
    tier = tier_at(tmp_path, key_file=key_file(tmp_path / "keys", old))
    await tier.open()
    await put(tier, keys[:3], 9000)
    await tier.aclose()
    raw = (tmp_path / "tier" / "payload.data").read_bytes()

    tier = tier_at(tmp_path, key_file=key_file(tmp_path / "keys", new, old))
    assert (await tier.open()).record_count == 3
    await put(tier, keys[3:], 9000)
    await assert_holds(tier, keys, 9000)
    await tier.aclose()

    tier = tier_at(tmp_path, key_file=key_file(tmp_path / "keys", new))
    assert (await tier.open()).record_count == 3
    assert "dropped 3 records" in caplog.text
    assert "or were stored without this encryption key" in caplog.text
    await assert_misses(tier, keys[:3], 9000)
    await assert_holds(tier, keys[3:], 9000)
    assert await put(tier, keys[:3], 9000) == [WriteOutcome.OK] * 3
    await tier.aclose()

    tier = tier_at(tmp_path)
    assert (await tier.open()).record_count == 0
    assert "or are encrypted" in caplog.text
    await tier.aclose()
    for key in keys:
        assert payload_of(key, 9000).tobytes()[:64] not in raw


async def test_an_encrypted_tier_serves_nothing_that_was_not_encrypted(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    await tier.open()
    await put(tier, [KEY], 9000)
    await tier.aclose()
    tier = tier_at(tmp_path, key_file=key_file(tmp_path / "keys", new_key()))
    await tier.open()
    await assert_misses(tier, [KEY], 9000)
    await tier.aclose()


async def test_tampered_ciphertext_is_corrupt(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, key_file=key_file(tmp_path / "keys", new_key()))
    await tier.open()
    await put(tier, [KEY], 9000)
    with (tmp_path / "tier" / "payload.data").open("r+b") as file:  # a test
        file.seek(4096 + 5000)
        byte = file.read(1)[0]
        file.seek(4096 + 5000)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    assert (await fetch(tier, KEY, 9000))[0] is ReadOutcome.CORRUPT
    await tier.aclose()


async def test_compressed_records_take_less_space(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, compress=True)
    await tier.open()
    payload = bfloat16_like(100_000)
    assert await tier.write([KEY], [payload]) == [WriteOutcome.OK]
    assert tier.used_bytes < 0.85 * payload.nbytes
    into = aligned(payload.nbytes)
    assert await tier.read([KEY], [into]) == [ReadOutcome.OK]
    assert np.array_equal(into, payload)
    tier.check()
    await tier.aclose()


async def test_compressed_records_are_read_after_compression_was_turned_off(
    tmp_path: Path,
) -> None:
    tier = tier_at(tmp_path, compress=True)
    await tier.open()
    payloads = [bfloat16_like(50_000), bfloat16_like(70_001), payload_of(key_of(2), 9000)]
    keys = [key_of(n) for n in range(3)]
    assert await tier.write(keys, payloads) == [WriteOutcome.OK] * 3
    await tier.aclose()
    tier = tier_at(tmp_path)
    await tier.open()
    into = [aligned(payload.nbytes) for payload in payloads]
    assert await tier.read(keys, into) == [ReadOutcome.OK] * 3
    assert all(map(np.array_equal, into, payloads))
    await tier.aclose()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "hexadecimal"),
        ("zz", 0o600, "hexadecimal"),
        ("ab" * 32 + "\n" + "é" * 32, 0o600, "hexadecimal"),
        ("ab" * 31, 0o600, "hexadecimal"),
        ("ab" * 32, 0o644, "chmod 600"),
    ],
)
def test_bad_key_files(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(TierIoError, match=message):
        KeyRing.load(path, bytes(16))
    with pytest.raises(TierIoError):
        KeyRing.load(tmp_path / "absent", bytes(16))

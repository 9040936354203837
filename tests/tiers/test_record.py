"""The tag of a record binds every field of the header and every byte of the payload."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.record import (
    HEADER_BYTES,
    Identity,
    RecordError,
    UseClock,
    check_identity,
    check_key,
    parse,
    seal,
    verify,
)

MINE = Identity(bytes(range(16)), 3)
KEY = bytes(range(32)) + (5).to_bytes(4, "big")
PAYLOAD = bytes(random.Random(1).randbytes(5000))


def sealed(payload: bytes = PAYLOAD) -> bytes:
    return seal(MINE, KEY, 9, payload, len(payload))


def test_a_sealed_record_verifies_and_parses() -> None:
    header = sealed()
    assert len(header) == HEADER_BYTES
    assert verify(header, MINE, KEY, 9, PAYLOAD)
    fields = parse(header)
    assert (fields.namespace, fields.rank, fields.group) == (MINE.namespace, 3, 5)
    assert (fields.epoch, fields.payload_bytes, fields.key_bytes) == (9, 5000, 36)


@pytest.mark.parametrize(
    ("identity", "key", "epoch", "payload"),
    [
        (Identity(bytes(16), 3), KEY, 9, PAYLOAD),
        (Identity(MINE.namespace, 2), KEY, 9, PAYLOAD),
        (MINE, KEY[:-1] + b"\x06", 9, PAYLOAD),
        (MINE, KEY + b"\x00", 9, PAYLOAD),
        (MINE, KEY, 8, PAYLOAD),
        (MINE, KEY, 9, PAYLOAD[:-1]),
        (MINE, KEY, 9, PAYLOAD + b"\x00"),
        (MINE, KEY, 9, PAYLOAD[8:16] + PAYLOAD[:8] + PAYLOAD[16:]),
    ],
    ids=["namespace", "rank", "key", "key length", "epoch", "short", "long", "words swapped"],
)
def test_anything_else_does_not_verify(
    identity: Identity, key: bytes, epoch: int, payload: bytes
) -> None:
    assert not verify(sealed(), identity, key, epoch, payload)


def test_every_flipped_header_bit_is_detected() -> None:
    header = sealed(PAYLOAD[:100])
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not verify(bytes(damaged), MINE, KEY, 9, PAYLOAD[:100]), bit


def test_every_flipped_key_bit_is_detected() -> None:
    """The header contains only the group and the length of the key: the tag binds the rest."""
    header = sealed(PAYLOAD[:100])
    for bit in range(8 * len(KEY)):
        other = bytearray(KEY)
        other[bit // 8] ^= 1 << bit % 8
        assert not verify(header, MINE, bytes(other), 9, PAYLOAD[:100]), bit


def test_every_flipped_payload_bit_is_detected() -> None:
    payload = PAYLOAD[:200]
    header = sealed(payload)
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not verify(header, MINE, KEY, 9, bytes(damaged)), bit


@given(st.binary(max_size=200))
def test_random_bytes_never_verify(raw: bytes) -> None:
    assert not verify(raw, MINE, KEY, 9, PAYLOAD)
    with pytest.raises(RecordError):
        parse(raw)


@pytest.mark.parametrize("key", [b"", b"x" * 512])
def test_invalid_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 511"):
        check_key(key)


def test_invalid_identities_are_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        check_identity(Identity(b"short", 0))
    with pytest.raises(ValueError, match="65535"):
        check_identity(Identity(bytes(16), 65536))


def test_times_of_use_grow_whatever_the_clock_shows() -> None:
    now = [100]
    clock = UseClock(40, lambda: now[0])
    assert list(clock.take(2)) == [100, 101]
    assert list(clock.take(2)) == [102, 103]
    now[0] = 50
    assert list(clock.take(1)) == [104]
    now[0] = 900
    assert list(clock.take(1)) == [900]
    assert list(UseClock(10**12, lambda: 5).take(1)) == [10**12]

"""Records for tests of tiers: keys, payloads derived from them, and assertions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiers.base import ALIGNMENT, Buffer, Key, ReadOutcome, StoredKey, Tier, WriteOutcome

OK = WriteOutcome.OK
"""The outcome of a write that stored its record."""
FULL = WriteOutcome.FULL
"""The outcome of a write that found no space."""
KIB = 1024
"""1,024 bytes."""
MIB = 1024 * KIB
"""1,024 KiB."""


def aligned(payload_bytes: int) -> Buffer:
    """Return an uninitialized buffer whose address is a multiple of ``ALIGNMENT``."""
    raw = np.empty(payload_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + payload_bytes]


def payload_of(key: Key, payload_bytes: int, version: int = 0) -> Buffer:
    """Return bytes that are unique to this key and version, in an aligned buffer."""
    seed = int.from_bytes(key, "big") * 1000 + version
    data = aligned(payload_bytes)
    data[:] = np.random.default_rng(seed).integers(0, 256, payload_bytes, np.uint8)
    return data


def key_of(number: int) -> Key:
    """Return a key of the length that vLLM uses: 32 bytes of hash and 4 of group."""
    return number.to_bytes(32, "big") + bytes(4)


async def all_keys(tier: Tier) -> list[StoredKey]:
    """Return all keys that ``tier.keys`` lists, oldest first."""
    batches = tier.keys()
    return [stored async for batch in batches for stored in batch.pairs()]


async def fetch(tier: Tier, key: Key, payload_bytes: int) -> tuple[ReadOutcome, Buffer]:
    """Read one key into a fresh buffer."""
    into = aligned(payload_bytes)
    [outcome] = await tier.read([key], [into])
    return outcome, into


async def assert_holds(tier: Tier, keys: Sequence[Key], payload_bytes: int) -> None:
    """Assert that every key reads as ``OK`` with the bytes of ``payload_of``."""
    into = [aligned(payload_bytes) for _ in keys]
    outcomes = await tier.read(keys, into)
    assert outcomes == [ReadOutcome.OK] * len(keys)
    for key, data in zip(keys, into, strict=True):
        assert np.array_equal(data, payload_of(key, payload_bytes)), key.hex()


async def assert_misses(tier: Tier, keys: Sequence[Key], payload_bytes: int) -> None:
    """Assert that every key reads as ``MISS``."""
    into = [aligned(payload_bytes) for _ in keys]
    assert await tier.read(keys, into) == [ReadOutcome.MISS] * len(keys)


async def put(tier: Tier, keys: Sequence[Key], payload_bytes: int) -> list[WriteOutcome]:
    """Write the bytes of ``payload_of`` for each key."""
    return await tier.write(keys, [payload_of(key, payload_bytes) for key in keys])

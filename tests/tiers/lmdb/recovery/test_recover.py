"""Recovery of an index, compared with the same rules applied to one record at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tiers.io.extents import Extent, gaps
from tiers.lmdb.index import pack_value
from tiers.lmdb.records.record_table import tables_of
from tiers.lmdb.recovery.recover import Expected, recover
from tiers.record import COMPRESSED, ENCRYPTED, Identity, prefix

SEED = 20261121
PAGES = 400
EXPECTED = Expected(Identity(), 3, PAGES)


def record(rng: random.Random) -> tuple[bytes, int, list[Extent], int]:
    """Generate keys, uses, extents and epochs, most of them good and some overlapping others."""
    extents = [
        Extent(rng.randrange(PAGES), rng.choice([1, 1, 2, 5])) for _ in range(rng.choice([1, 3]))
    ]
    key = rng.randbytes(rng.choice([8, 36, 36]))
    return key, rng.randrange(1 << 60), extents, rng.choice([3] * 9 + [2])


@pytest.mark.parametrize("count", [0, 1, 5, 30, 120])
@pytest.mark.parametrize("seed", range(SEED, SEED + 8))
def test_good_and_bad_records(count: int, seed: int) -> None:
    rng = random.Random(f"{seed} {count}")
    records = [record(rng) for _ in range(count)]
    values = {}
    for key, use, extents, epoch in records:
        size = 4096 * sum(extent.pages for extent in extents)
        header = prefix(Identity(), key, epoch, size) + bytes(16)
        values[key] = pack_value(use, header, tuple(extents))
    good = {
        key: extents
        for key, _, extents, epoch in records
        if epoch == 3 and all(extent.start >= 1 and sum(extent) <= PAGES for extent in extents)
    }
    owners: dict[int, list[bytes]] = {}
    for key, extents in good.items():
        for start, pages in extents:
            for page in range(start, start + pages):
                owners.setdefault(page, []).append(key)
    shared = {key for keys in owners.values() if len(keys) > 1 for key in keys}
    found = recover(tables_of(values.items()), EXPECTED)
    by_use = sorted(set(good) - shared, key={key: use for key, use, _, _ in records}.__getitem__)
    assert [key for batch in found.records.by_use() for key in batch.keys] == by_use
    assert sorted(found.bad) == sorted(set(values) - set(by_use))
    used = [Extent(0, 1), *(extent for key in by_use for extent in good[key])]
    assert found.free == gaps(PAGES, used)
    assert dict(found.records.items()) == {key: values[key] for key in by_use}
    found.records.check()


KEY_ID, OTHER_KEY_ID = b"mine", b"lost"


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({"identity": Identity(bytes(16), 1)}, False),
        ({"identity": Identity(b"another namespac")}, False),
        ({"epoch": 2}, False),
        ({"epoch": 4}, False),
        ({"flags": ENCRYPTED, "key_id": KEY_ID}, False),
    ],
)
@pytest.mark.parametrize("key_ids", [frozenset(), frozenset([KEY_ID])])
def test_only_our_own_records_are_trusted(
    changed: dict[str, Any], is_good: bool, key_ids: frozenset[bytes]
) -> None:
    """If records must be encrypted, only those encrypted with an available key are good; otherwise
    only unencrypted ones."""
    fields = {"identity": Identity(), "epoch": 3, "payload_bytes": 4096, **changed}
    if key_ids:
        fields |= {"flags": ENCRYPTED, "key_id": KEY_ID}
        is_good = is_good or "key_id" in changed
    value = pack_value(1, prefix(key=b"key", **fields) + bytes(16), (Extent(1, 1),))
    found = recover(tables_of([(b"key", value)]), Expected(Identity(), 3, PAGES, key_ids))
    assert (len(found.records), found.bad) == ((1, []) if is_good else (0, [b"key"]))


@pytest.mark.parametrize("fields", [{}, {"flags": ENCRYPTED, "key_id": OTHER_KEY_ID}])
def test_records_that_no_available_key_opens_are_not_trusted(fields: dict[str, Any]) -> None:
    """If they were trusted, lookups would find them, and each load of them would fail."""
    value = pack_value(
        1, prefix(Identity(), b"key", 3, 4096, **fields) + bytes(16), (Extent(1, 1),)
    )
    expected = Expected(Identity(), 3, PAGES, frozenset([KEY_ID]))
    assert recover(tables_of([(b"key", value)]), expected).bad == [b"key"]


@pytest.mark.parametrize("flags", [0, COMPRESSED, ENCRYPTED, COMPRESSED | ENCRYPTED])
@pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 4097, 1 << 62, (1 << 64) - 1])
def test_a_length_that_contradicts_the_stored_length(flags: int, payload_bytes: int) -> None:
    """A trusted length with one flipped bit could use up the whole capacity."""
    key_ids = frozenset([bytes(4)] if flags & ENCRYPTED else [])
    header = prefix(Identity(), b"key", 3, payload_bytes, stored_bytes=4096, flags=flags)
    value = pack_value(1, header + bytes(16), (Extent(1, 1),))
    found = recover(tables_of([(b"key", value)]), Expected(Identity(), 3, PAGES, key_ids))
    is_good = payload_bytes > 4096 if flags & COMPRESSED else payload_bytes == 4096
    assert (len(found.records), found.bad) == ((1, []) if is_good else (0, [b"key"]))

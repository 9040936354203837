"""The records in memory against a dict, and their hash table against its definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiers.io.extents import Extent
from tiers.lmdb.index import pack_value
from tiers.lmdb.records.key_order import rising
from tiers.lmdb.records.key_table import HASHED_AT_ONCE, MODULUS, KeyTable, remainders
from tiers.lmdb.records.record_map import RecordMap
from tiers.lmdb.records.record_table import tables_of
from tiers.lmdb.records.rows import Rows
from tiers.record import Identity, prefix
from tiers.testing import key_of

SEED = 20261121


def value_of(key: bytes, use: int, extents: int = 1) -> bytes:
    header = prefix(Identity(), key, 0, 4096 * extents) + bytes(16)
    return pack_value(use, header, tuple(Extent(use + 10 * n, 1) for n in range(extents)))


def some_key(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([36] * 9 + [8]))


def begun(rng: random.Random, count: int) -> tuple[RecordMap, dict[bytes, bytes]]:
    """Records as found in an index, some of them bad."""
    found = {}
    for use in rng.sample(range(1, 10 * count + 1), count):
        key = some_key(rng)
        found[key] = value_of(key, use, rng.choice([1] * 9 + [3]))
    tables = tables_of(found.items())
    good = [np.array([rng.random() < 0.9 for _ in range(t.count)], np.bool_) for t in tables]
    model = {
        key: found[key]
        for table, mask in zip(tables, good, strict=True)
        for key, is_good in zip(table.keys(), mask.tolist(), strict=True)
        if is_good
    }
    return RecordMap(tables, good), model


@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("seed", range(SEED, SEED + 5))
def test_the_record_map_agrees_with_a_dict(count: int, seed: int) -> None:
    rng = random.Random(f"{seed} {count}")
    records, model = begun(rng, count)
    use = 20 * count
    for step in range(6 * count + 20):
        use += 1
        known = rng.choice(list(model)) if model and rng.random() < 0.8 else some_key(rng)
        what = rng.choice(["add", "pop", "pop", "pop", "touch", "get"])
        if what == "add" and known not in model:
            model[known] = value_of(known, use, rng.choice([1, 1, 2]))
            records.add(known, model[known])
        elif what == "pop":
            assert records.pop(known) == model.pop(known, None)
        elif what == "touch":
            assert records.touch(known, use) == (known in model)
            if known in model:
                model[known] = use.to_bytes(8, "big") + model[known][8:]
        assert records.get(known) == model.get(known)
        assert (known in records, len(records)) == (known in model, len(model))
        if step % 50 == 0:
            records.check()
            assert dict(records.items()) == model
            found = [pair for batch in records.by_use() for pair in batch.pairs()]
            assert [pair.key for pair in found] == sorted(model, key=lambda key: model[key][:8])
    records.clear()
    assert (len(records), list(records.by_use())) == (0, [])


def test_rows_are_released_when_most_are_deleted() -> None:
    keys = [key_of(number) for number in range(1000)]
    tables = tables_of((key, value_of(key, 1 + n)) for n, key in enumerate(keys))
    records = RecordMap(tables, [np.ones(1000, np.bool_)])
    assert records._table is tables[0]
    for gone in range(700):
        assert records.pop(keys[gone]) is not None
    assert records._table.count == 0
    assert [key for batch in records.by_use() for key in batch.keys] == keys[700:]


@pytest.mark.parametrize("key_bytes", [1, 7, 8, 36, 200, 511])
def test_remainders_are_those_of_python(key_bytes: int) -> None:
    rng = random.Random(SEED)
    keys = [rng.randbytes(key_bytes) for _ in range(5000)]
    keys += [bytes([255]) * key_bytes, bytes(key_bytes)]
    if key_bytes >= 8:
        keys += [(MODULUS + n).to_bytes(key_bytes, "little") for n in range(-1, 9)]
    padded = [key + bytes(-key_bytes % 8) for key in keys]
    words = np.frombuffer(b"".join(padded), "<u8").reshape(len(keys), -1)
    assert remainders(words).tolist() == [hash(int.from_bytes(key, "little")) for key in keys]


@pytest.mark.parametrize("step", [0, 1, 2, 61, 1 << 40])
def test_keys_that_collide_are_found(step: int) -> None:
    """All keys have the same home, or the last homes, whose entries go beyond the end."""
    count = 200
    homes = 2 * count | 1
    first = homes - 3
    keys = [(first + n * step + n * MODULUS).to_bytes(36, "little") for n in range(count)]
    rows = Rows(40)
    rows.extend(np.frombuffer(b"".join(key + bytes(4) for key in keys), "V40"))
    slots = KeyTable(rows, 36, np.arange(count))
    assert [slots.find(key) for key in keys] == [40 * n for n in range(count)]
    for number in range(0, count, 2):
        assert slots.remove(keys[number]) == 40 * number
        assert slots.remove(keys[number]) == -1
    assert slots.numbers().tolist() == list(range(1, count, 2))
    assert [slots.find(key) for key in keys[1::2]] == [40 * n for n in range(1, count, 2)]
    assert slots.find(bytes(36)) == slots.find(b"") == -1


@pytest.mark.parametrize("bits", [1, 20, 40, 50, 60, 63])
@pytest.mark.parametrize("count", [1, 2, 1000, 5000])
def test_sorting_by_time_equals_argsort(bits: int, count: int) -> None:
    """Times far apart and close together, and garbage with the highest bit set."""
    rng = np.random.default_rng(SEED)
    numbers = rng.integers(-(1 << bits), 1 << bits, count // 2 + 1)
    numbers = rng.permutation(np.concatenate((numbers, numbers + 1)))
    order = rising(numbers)
    assert sorted(order.tolist()) == list(range(numbers.size))
    assert numbers[order].tolist() == sorted(numbers.tolist())
    assert rising(numbers[:0]).size == 0


def test_tables_of_several_parts_lose_no_key() -> None:
    """Colliding entries continue from one part of the construction to the next."""
    rng = random.Random(SEED)
    keys = [rng.randbytes(36) for _ in range(10 * HASHED_AT_ONCE)]
    rows = Rows(36)
    rows.extend(np.frombuffer(b"".join(keys), "V36"))
    for numbers in (None, np.arange(0, len(keys), 2)):
        slots = KeyTable(rows, 36, numbers)
        chosen = range(len(keys)) if numbers is None else numbers.tolist()
        assert [slots.find(keys[n]) for n in chosen] == [36 * n for n in chosen]
        assert slots.numbers().tolist() == list(chosen)

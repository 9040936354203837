"""The chunks that a restart enters into the index, and those that it returns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.index.capacity import ByteCapacity
from offload.index.recovered_chunks import held_by_all, recover
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_suffix
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from tiers.base import KeyColumn

INFOS = {0: EntryInfo(0, size_bytes=10), 3: EntryInfo(3, "window", size_bytes=30)}


def key_of(number: int, group: int) -> bytes:
    return number.to_bytes(32) + group_suffix(group)


def column_of(keys: list[bytes]) -> KeyColumn:
    return np.frombuffer(b"".join(keys), f"V{len(keys[0])}")


def index_for(capacity: int) -> TierIndex:
    return TierIndex("disk", ByteCapacity(capacity), LruPolicy())


def test_every_key_gets_the_size_of_its_group_and_keeps_its_position() -> None:
    index = index_for(1000)
    keys = [key_of(number, (0, 3)[number % 2]) for number in range(8)]
    assert recover(index, [column_of(keys[:4]), column_of(keys[4:])], INFOS) == []
    assert index.resident == {key: (10, 30)[n % 2] for n, key in enumerate(keys)}
    assert index.space.used == 4 * 10 + 4 * 30
    assert index.policy.victims(8, lambda key: True) == keys
    index.check()


def test_chunks_without_a_group_or_space_are_returned() -> None:
    index = index_for(35)
    known = [key_of(number, 0) for number in range(5)]
    strange = [key_of(9, 7), key_of(10, 7)]
    short = [b"abc", b"xyz"]
    columns = [column_of(short), column_of([known[0], strange[0], *known[1:], strange[1]])]
    rejected = recover(index, columns, INFOS)
    assert set(rejected) == {*short, *strange, known[3], known[4]}
    assert list(index.resident) == known[:3]


def test_an_empty_tier_has_no_chunks() -> None:
    assert recover(index_for(10), [], INFOS) == []
    assert recover(index_for(10), [column_of([key_of(1, 0)])[:0]], INFOS) == []


@pytest.mark.parametrize("seed", range(5))
def test_only_chunks_that_all_ranks_hold_count(seed: int) -> None:
    draw = random.Random(seed)
    keys = [key_of(number, 0) for number in range(30)]
    held = [draw.sample(keys, 25) for _ in range(3)]
    columns = [[column_of(one[:10]), column_of(one[10:])] for one in held]
    kept, lost = held_by_all(columns)
    everywhere = set.intersection(*map(set, held))
    assert [key for column in kept for key in column.tolist()] == [
        key for key in held[0] if key in everywhere
    ]
    assert lost == set.union(*map(set, held)) - everywhere


def test_ranks_with_the_same_chunks_keep_all_of_them() -> None:
    keys = [column_of([key_of(number, 0) for number in range(5)])]
    assert held_by_all([keys, keys]) == (keys, set())
    assert held_by_all([keys]) == (keys, set())

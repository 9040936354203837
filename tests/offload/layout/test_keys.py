"""Packed keys are the same keys."""

from __future__ import annotations

import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from offload.layout.keys import (
    chunk_keys,
    count_groups,
    group_of,
    groups_of,
    joined,
    pack_keys,
    unpack_keys,
)
from tiers.base import stored_keys

one_length = st.integers(1, 40).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length))
)
lengths_of_all_kinds = st.lists(st.binary(max_size=8))


HASHES = [bytes([n]) * 32 for n in range(7)]


def test_a_key_is_the_hash_at_the_end_of_its_chunk_and_its_group() -> None:
    """That hash covers everything before it; the first hash in the chunk does not."""
    assert chunk_keys(HASHES, 3, 2) == [HASHES[at] + b"\0\0\0\3" for at in (1, 3, 5)]
    assert chunk_keys(HASHES, 3, 2, 1, end_chunk=2) == [HASHES[3] + b"\0\0\0\3"]
    assert chunk_keys(HASHES[:5], 3, 2) == chunk_keys(HASHES, 3, 2)[:2], "whole chunks only"


def test_groups_and_adapters_share_no_key() -> None:
    """An adapter's content is not part of vLLM's hash: two adapters of the same name have equal
    hashes."""
    owners = [(group, identity) for group in (0, 1, 256) for identity in (b"", b"one", b"other")]
    keys = [chunk_keys(HASHES, group, 1, identity=identity) for group, identity in owners]
    assert len({key for mine in keys for key in mine}) == len(owners) * len(HASHES)
    assert [group_of(mine[0]) for mine in keys] == [group for group, _ in owners]
    assert keys[1] == chunk_keys(HASHES, 0, 1, identity=b"one"), "it is the same in each process"
    flat = [key for mine in keys for key in mine]
    assert count_groups(flat) == {0: 3 * len(HASHES), 1: 3 * len(HASHES), 256: 3 * len(HASHES)}


@given(keys=one_length | lengths_of_all_kinds)
def test_packed_keys_are_unpacked_unchanged(keys: list[bytes]) -> None:
    if b"" in keys and len(set(map(len, keys))) == 1:
        return  # keys have at least one byte
    assert unpack_keys(*pack_keys(keys)) == tuple(keys)


@given(keys=st.lists(st.binary(min_size=5, max_size=40), max_size=60))
def test_columns_contain_the_same_keys(keys: list[bytes]) -> None:
    columns = [batch.column for batch in stored_keys((key, 1) for key in keys)]
    found = joined(pickle.loads(pickle.dumps(columns)))
    assert [key for column in found for key in column.tolist()] == keys
    assert [group for column in found for group in groups_of(column)] == list(map(group_of, keys))
    lengths = [column.itemsize for column in found]
    assert all(one != two for one, two in itertools.pairwise(lengths))

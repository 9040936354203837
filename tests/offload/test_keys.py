"""Keys in one piece are the same keys."""

from __future__ import annotations

import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from offload.keys import group_of, groups_of, joined, pack_keys, unpack_keys
from tiers.base import stored_keys

one_length = st.integers(1, 40).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length))
)
lengths_of_all_kinds = st.lists(st.binary(max_size=8))


@given(keys=one_length | lengths_of_all_kinds)
def test_packed_keys_come_back(keys: list[bytes]) -> None:
    if b"" in keys and len(set(map(len, keys))) == 1:
        return  # keys have at least one byte
    assert unpack_keys(*pack_keys(keys)) == tuple(keys)


@given(keys=st.lists(st.binary(min_size=5, max_size=40), max_size=60))
def test_columns_hold_the_same_keys(keys: list[bytes]) -> None:
    columns = [batch.column for batch in stored_keys((key, 1) for key in keys)]
    found = joined(pickle.loads(pickle.dumps(columns)))
    assert [key for column in found for key in column.tolist()] == keys
    assert [group for column in found for group in groups_of(column)] == list(map(group_of, keys))
    lengths = [column.itemsize for column in found]
    assert all(one != two for one, two in itertools.pairwise(lengths))

"""Keys in one piece are the same keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.keys import pack_keys, unpack_keys

one_length = st.integers(1, 40).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length))
)
lengths_of_all_kinds = st.lists(st.binary(max_size=8))


@given(keys=one_length | lengths_of_all_kinds)
def test_packed_keys_come_back(keys: list[bytes]) -> None:
    if b"" in keys and len(set(map(len, keys))) == 1:
        return  # keys have at least one byte
    assert unpack_keys(*pack_keys(keys)) == tuple(keys)

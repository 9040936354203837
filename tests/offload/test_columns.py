"""Rows of a load survive being packed, and a pickled load is unpacked only when it is read."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from offload.columns import pack, unpack
from offload.plans import LoadItem, LoadJob

NUMBER = st.integers(-(2**63), 2**63 - 1)
ROW = st.tuples(
    st.binary(max_size=40), NUMBER, st.lists(NUMBER, max_size=4).map(tuple), NUMBER, NUMBER
)


@given(st.lists(ROW, max_size=20))
def test_rows_survive(rows: list[tuple[bytes, int, tuple[int, ...], int, int]]) -> None:
    assert list(unpack(pack(rows))) == rows


def test_a_load_is_unpacked_by_whoever_reads_it() -> None:
    items = (LoadItem(b"key", 1, (2, -1), 3, 0), LoadItem(b"k", 0, (4,), -1, -1))
    found = pickle.loads(pickle.dumps(LoadJob(7, "r", items)))
    assert found._items is None
    assert (found.job, found.request, found.items) == (7, "r", items)
    assert type(found.items[0]) is LoadItem
    again = pickle.loads(pickle.dumps(found))
    assert again.items == items
    assert pickle.loads(pickle.dumps(LoadJob(1, "", ()))).items == ()

"""Rows of a load survive being packed, and a pickled load is unpacked only when it is read."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.messages.plan import (
    NO_CHUNKS,
    Columns,
    Keys,
    LoadItem,
    LoadJob,
    StoreJob,
    WriteThroughJob,
)

NUMBER = st.integers(-1, 2**40)


@st.composite
def rows(draw: st.DrawFn) -> list[Any]:
    """Keys and block lists of equal or of different lengths."""
    count = draw(st.integers(0, 12))
    key_bytes = draw(st.sampled_from([None, 36]))
    width = draw(st.sampled_from([None, 1, 2]))

    def each(what: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(what, min_size=count, max_size=count))

    sizes = (
        {"min_size": 1, "max_size": 40} if key_bytes is None else {"min_size": 36, "max_size": 36}
    )
    widths = {"max_size": 4} if width is None else {"min_size": width, "max_size": width}
    blocks = each(st.lists(NUMBER, **widths).map(tuple))
    keys = each(st.binary(**sizes))
    return list(zip(keys, each(NUMBER), blocks, each(NUMBER), each(NUMBER), strict=True))


@given(rows())
def test_rows_survive_packing(given: list[Any]) -> None:
    found = Columns.of(given) if given else NO_CHUNKS
    packed = pickle.loads(pickle.dumps(found.pack()))
    assert list(packed.unpack().rows()) == list(found.rows()) == given


def test_a_load_is_unpacked_when_it_is_read() -> None:
    items = (LoadItem(b"key", 1, (2, -1), 3, 0), LoadItem(b"k", 0, (4,), -1, -1))
    found = pickle.loads(pickle.dumps(LoadJob(7, "r", items)))
    assert found._items is None
    assert (found.job, found.request, found.items) == (7, "r", items)
    assert type(found.items[0]) is LoadItem
    again = pickle.loads(pickle.dumps(found))
    assert again.items == items
    assert pickle.loads(pickle.dumps(LoadJob(1, "", ()))).items == ()
    nameless = (LoadItem(b"", 0, (), -1, -1),) * 2
    assert pickle.loads(pickle.dumps(LoadJob(1, "", nameless))).items == nameless
    part = pickle.loads(pickle.dumps(LoadJob(1, "r", items, 3, False)))
    assert (part.part, part.is_last, part.items) == (3, False, items)


def test_a_store_is_unpacked_when_it_is_read() -> None:
    found = pickle.loads(pickle.dumps(StoreJob(7, 1, [2, 3, 4, 5], [8, 9])))
    assert isinstance(found._rows, bytes)
    again = pickle.loads(pickle.dumps(found))
    for job in (found, again):
        assert (job.job, job.group, job.blocks, job.slots) == (7, 1, [2, 3, 4, 5], [8, 9])
    assert repr(found) == "StoreJob(7, 1, [2, 3, 4, 5], [8, 9])"


@pytest.mark.parametrize(
    "keys", [(), (b"",), (b"key",), (b"key", b"yek"), (b"key", b"", b"longer")]
)
def test_keys_are_pickled_as_one_bytes_object(keys: tuple[bytes, ...]) -> None:
    found = pickle.loads(pickle.dumps(Keys(keys)))
    assert isinstance(found._keys, bytes)
    again = pickle.loads(pickle.dumps(found))
    assert (len(found), bool(found), list(found)) == (len(keys), bool(keys), list(keys))
    assert found == again == keys
    assert found != (*keys, b"another")
    assert found[:1] == keys[:1]


def test_a_write_through_is_unpacked_when_it_is_read() -> None:
    found = pickle.loads(pickle.dumps(WriteThroughJob(7, 1, 2, (b"key", b"yek"), (8, 9))))
    assert isinstance(found.keys._keys, bytes)
    again = pickle.loads(pickle.dumps(found))
    for job in (found, again):
        assert (job.job, job.tier, job.group) == (7, 1, 2)
        assert (tuple(job.keys), list(job.slots)) == ((b"key", b"yek"), [8, 9])

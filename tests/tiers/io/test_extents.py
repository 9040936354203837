"""The extent map against a naive model: a set of free pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.io.extents import EXTENTS_PER_RECORD_MAX, Extent, ExtentMap, Extents, clip, gaps
from tiers.lmdb.allocations import Allocations

PAGES = 60


def pages_of(extents: Extents) -> set[int]:
    return {page for extent in extents for page in range(extent.start, extent.start + extent.pages)}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100))))
def test_allocations_are_disjoint_and_nothing_is_lost(
    steps: list[tuple[bool, int, int]],
) -> None:
    space = ExtentMap(PAGES, gaps(PAGES, []))
    free = set(range(PAGES))
    taken: list[Extents] = []
    for is_release, pages, pick in steps:
        if is_release and taken:
            extents = taken.pop(pick % len(taken))
            space.release(extents)
            free |= pages_of(extents)
        else:
            extents_or_none = space.allocate(pages)
            assert (extents_or_none is None) == (pages > len(free))
            if extents_or_none is not None:
                assert len(pages_of(extents_or_none)) == pages
                assert pages_of(extents_or_none) <= free
                free -= pages_of(extents_or_none)
                taken.append(extents_or_none)
        assert space.free_pages == len(free)
        assert space.free_extents() == gaps(
            PAGES, [extent for extents in taken for extent in extents]
        )


def test_records_written_together_are_adjacent() -> None:
    space = ExtentMap(100, gaps(100, []))
    allocations = [space.allocate(4) for _ in range(10)]
    assert allocations == [(Extent(4 * n, 4),) for n in range(10)]


def test_eviction_by_age_keeps_whole_extents() -> None:
    """Under churn at 90 % full, no allocation is ever split, because records are stored in order of
    age."""
    space = ExtentMap(1000, gaps(1000, []))
    live: list[Extents] = []
    for _ in range(5000):
        if len(live) >= 90:
            space.release(live.pop(0))
        extents = space.allocate(10)
        assert extents is not None
        assert len(extents) == 1
        live.append(extents)


def test_a_record_is_split_only_when_no_free_extent_is_long_enough() -> None:
    space = ExtentMap(10, [Extent(0, 3), Extent(5, 3)])
    assert space.allocate(5) == (Extent(0, 3), Extent(5, 2))
    assert space.allocate(2) is None
    assert space.free_pages == 1


def test_too_many_pieces_are_refused_completely() -> None:
    space = ExtentMap(1000, [Extent(2 * n, 1) for n in range(EXTENTS_PER_RECORD_MAX + 1)])
    assert space.allocate(EXTENTS_PER_RECORD_MAX + 1) is None
    assert space.free_pages == EXTENTS_PER_RECORD_MAX + 1


def test_growing_merges_with_the_free_end() -> None:
    space = ExtentMap(10, gaps(10, [Extent(0, 8)]))
    space.extend(5)
    assert space.free_extents() == [Extent(8, 7)]


@pytest.mark.parametrize("used", [[Extent(0, 4), Extent(3, 2)], [Extent(8, 3)]])
def test_invalid_calls_are_refused(used: list[Extent]) -> None:
    with pytest.raises(ValueError, match="overlap"):
        gaps(10, used)


def test_an_extent_is_free_only_after_commit_and_last_read() -> None:
    allocations = Allocations(5, [Extent(1, 4)])
    extents = allocations.allocate(4)
    assert extents is not None
    allocations.adopt(extents, 4)
    allocations.lease(extents)
    allocations.lease(extents)
    allocations.hold(extents)
    assert allocations.allocate(1) is None, "the transaction is not durable yet"
    allocations.free(extents)
    assert allocations.allocate(1) is None, "two reads are under way"
    allocations.release(extents)
    assert allocations.allocate(1) is None, "one read is under way"
    allocations.check([])
    allocations.release(extents)
    assert allocations.allocate(4) == extents


def test_clearing_frees_all_but_reads_and_writes_under_way() -> None:
    allocations = Allocations(11, [Extent(1, 10)])
    present, being_read, being_written = (allocations.allocate(2) for _ in range(3))
    assert present is not None
    assert being_read is not None
    assert being_written is not None
    allocations.adopt(present, 2)
    allocations.adopt(being_read, 2)
    allocations.lease(being_read)
    allocations.free_present()
    allocations.check([])
    assert allocations.used_pages == 4
    allocations.release(being_read)
    assert allocations.used_pages == 2
    allocations.adopt(being_written, 2)
    allocations.check([being_written])


def test_the_rest_left_by_a_shorter_record_is_free() -> None:
    allocations = Allocations(11, [Extent(1, 10)])
    extents = allocations.allocate(6)
    assert extents is not None
    allocations.adopt(extents, 2)
    assert allocations.used_pages == 2
    allocations.check([(Extent(1, 2),)])


def test_clipping_cuts_inside_a_run() -> None:
    extents = (Extent(10, 3), Extent(20, 3))
    assert clip(extents, 4) == ((Extent(10, 3), Extent(20, 1)), (Extent(21, 2),))
    assert clip(extents, 6) == (extents, ())
    assert clip(extents, 3) == ((Extent(10, 3),), (Extent(20, 3),))

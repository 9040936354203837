"""The extent map against a naive model: a set of free pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.io.extents import RUNS_PER_RECORD_MAX, Extent, ExtentMap, Runs, clip, gaps
from tiers.lmdb.allocations import Allocations

PAGES = 60


def pages_of(runs: Runs) -> set[int]:
    return {page for run in runs for page in range(run.start, run.start + run.pages)}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100))))
def test_allocations_are_disjoint_and_nothing_is_lost(
    steps: list[tuple[bool, int, int]],
) -> None:
    space = ExtentMap(PAGES, gaps(PAGES, []))
    free = set(range(PAGES))
    taken: list[Runs] = []
    for is_release, pages, pick in steps:
        if is_release and taken:
            runs = taken.pop(pick % len(taken))
            space.release(runs)
            free |= pages_of(runs)
        else:
            runs_or_none = space.allocate(pages)
            assert (runs_or_none is None) == (pages > len(free))
            if runs_or_none is not None:
                assert len(pages_of(runs_or_none)) == pages
                assert pages_of(runs_or_none) <= free
                free -= pages_of(runs_or_none)
                taken.append(runs_or_none)
        assert space.free_pages == len(free)
        assert space.free_runs() == gaps(PAGES, [run for runs in taken for run in runs])


def test_records_written_together_lie_together() -> None:
    space = ExtentMap(100, gaps(100, []))
    places = [space.allocate(4) for _ in range(10)]
    assert places == [(Extent(4 * n, 4),) for n in range(10)]


def test_eviction_by_age_keeps_whole_runs() -> None:
    """Churn at 90 % full: no place is ever cut in pieces, because ages lie in order."""
    space = ExtentMap(1000, gaps(1000, []))
    live: list[Runs] = []
    for _ in range(5000):
        if len(live) >= 90:
            space.release(live.pop(0))
        runs = space.allocate(10)
        assert runs is not None
        assert len(runs) == 1
        live.append(runs)


def test_a_record_is_cut_only_when_no_run_is_long_enough() -> None:
    space = ExtentMap(10, [Extent(0, 3), Extent(5, 3)])
    assert space.allocate(5) == (Extent(0, 3), Extent(5, 2))
    assert space.allocate(2) is None
    assert space.free_pages == 1


def test_too_many_pieces_are_refused_whole() -> None:
    space = ExtentMap(1000, [Extent(2 * n, 1) for n in range(RUNS_PER_RECORD_MAX + 1)])
    assert space.allocate(RUNS_PER_RECORD_MAX + 1) is None
    assert space.free_pages == RUNS_PER_RECORD_MAX + 1


def test_growing_joins_the_free_end() -> None:
    space = ExtentMap(10, gaps(10, [Extent(0, 8)]))
    space.extend(5)
    assert space.free_runs() == [Extent(8, 7)]


@pytest.mark.parametrize("used", [[Extent(0, 4), Extent(3, 2)], [Extent(8, 3)]])
def test_impossible_use_is_refused(used: list[Extent]) -> None:
    with pytest.raises(ValueError, match="overlap"):
        gaps(10, used)


def test_a_place_is_free_only_after_commit_and_last_read() -> None:
    places = Allocations(5, [Extent(1, 4)])
    runs = places.allocate(4)
    assert runs is not None
    places.adopt(runs, 4)
    places.pin(runs)
    places.pin(runs)
    places.forget(runs)
    assert places.allocate(1) is None, "the transaction is not durable yet"
    places.freed(runs)
    assert places.allocate(1) is None, "two reads are under way"
    places.unpin(runs)
    assert places.allocate(1) is None, "one read is under way"
    places.check([])
    places.unpin(runs)
    assert places.allocate(4) == runs


def test_clearing_frees_all_but_reads_and_writes_under_way() -> None:
    places = Allocations(11, [Extent(1, 10)])
    present, being_read, being_written = (places.allocate(2) for _ in range(3))
    assert present is not None
    assert being_read is not None
    assert being_written is not None
    places.adopt(present, 2)
    places.adopt(being_read, 2)
    places.pin(being_read)
    places.cleared()
    places.check([])
    assert places.used_pages == 4
    places.unpin(being_read)
    assert places.used_pages == 2
    places.adopt(being_written, 2)
    places.check([being_written])


def test_what_a_shorter_record_leaves_is_free() -> None:
    places = Allocations(11, [Extent(1, 10)])
    runs = places.allocate(6)
    assert runs is not None
    places.adopt(runs, 2)
    assert places.used_pages == 2
    places.check([(Extent(1, 2),)])


def test_clipping_cuts_inside_a_run() -> None:
    runs = (Extent(10, 3), Extent(20, 3))
    assert clip(runs, 4) == ((Extent(10, 3), Extent(20, 1)), (Extent(21, 2),))
    assert clip(runs, 6) == (runs, ())
    assert clip(runs, 3) == ((Extent(10, 3),), (Extent(20, 3),))

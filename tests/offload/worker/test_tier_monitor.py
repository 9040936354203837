"""The monitor of a tier: which operations count as good, failed and late. No operation is
abandoned, and all results and exceptions are passed on.

Time is the loop's virtual time (``tests.sim.virtual_time``), so no test really waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from offload.messages.report import Observed
from offload.worker.tier_monitor import LATE_REPORTS_MAX, TierMonitor
from tests.sim.virtual_time import run_virtually
from tiers.base import ReadOutcome, TierIoError, WriteOutcome

OK, MISS, CORRUPT, BUSY = ReadOutcome
GOOD, FULL, FAILED = WriteOutcome


class Watched:
    """A monitor with a deadline of a second, and everything that it reported."""

    def __init__(self) -> None:
        self.seen: list[Observed] = []
        self.monitor = TierMonitor(1.0, self.seen.append)

    @property
    def total(self) -> Observed:
        total = Observed()
        for seen in self.seen:
            total = total.merge(seen)
        return total


async def answer(outcomes: list[ReadOutcome], after_s: float = 0.0) -> list[ReadOutcome]:
    await asyncio.sleep(after_s)
    return outcomes


async def written(outcomes: list[WriteOutcome], after_s: float = 0.0) -> list[WriteOutcome]:
    await asyncio.sleep(after_s)
    return outcomes


async def fail(after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    raise TierIoError("gone")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([OK, OK], Observed(reads_good=1)),
        ([OK, CORRUPT], Observed(reads_good=1)),
        ([CORRUPT, MISS], Observed(reads_failed=1)),
        ([MISS, MISS], Observed()),
        ([BUSY, MISS], Observed(reads_failed=1)),
        ([BUSY, OK], Observed(reads_good=1)),
    ],
)
def test_the_outcomes_of_a_read_are_counted(
    outcomes: list[ReadOutcome], expected: Observed
) -> None:
    watched = Watched()
    assert run_virtually(watched.monitor.read(answer(outcomes), len(outcomes))) == outcomes
    assert watched.total == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([GOOD, GOOD], Observed(writes_good=1)),
        ([GOOD, FULL], Observed(writes_good=1)),
        ([FULL, FULL], Observed(writes_failed=1)),
        ([FAILED], Observed(writes_failed=1)),
    ],
)
def test_the_outcomes_of_a_write_are_counted(
    outcomes: list[WriteOutcome], expected: Observed
) -> None:
    watched = Watched()
    assert run_virtually(watched.monitor.write(written(outcomes), len(outcomes))) == outcomes
    assert watched.total == expected


@pytest.mark.parametrize("after_s", [0.0, 2.5])
def test_a_failure_is_counted_and_passed_on(after_s: float) -> None:
    for method, expected, *counts in (
        ("read", Observed(reads_failed=1 + int(after_s)), 1),
        ("write", Observed(writes_failed=1 + int(after_s)), 1),
        ("change", Observed(writes_failed=1 + int(after_s))),
    ):
        watched = Watched()
        operation: Awaitable[None] = fail(after_s)
        with pytest.raises(TierIoError):
            run_virtually(getattr(watched.monitor, method)(operation, *counts))
        assert watched.total == expected, method


@pytest.mark.parametrize("after_s", [0.0, 1.5, 2.0, 3.5])
@pytest.mark.parametrize("how", ["fails", "answers", "answers wrongly"])
def test_a_query_is_one_failure_at_most(how: str, after_s: float) -> None:
    """A store that does not answer is given up when its query has been late for a while. Together
    with one failed read, two failures would already open the breaker."""

    async def answered() -> list[bool]:
        await asyncio.sleep(after_s)
        return [True] * (1 if how == "answers" else 2)

    watched = Watched()
    operation: Any = fail(after_s) if how == "fails" else answered()
    query = watched.monitor.query(operation, 1)
    if how == "answers":
        assert run_virtually(query) == [True]
    else:
        with pytest.raises(TierIoError):
            run_virtually(query)
    is_failure = how != "answers" or after_s > 1.0
    assert watched.total == Observed(reads_failed=int(is_failure))


@pytest.mark.parametrize(
    "outcomes", [[], [OK], [OK] * 3, [OK, "ok"], [OK, GOOD], None, iter([OK, OK])]
)
def test_a_result_that_does_not_match_the_keys_is_a_failure(outcomes: Any) -> None:
    watched = Watched()
    with pytest.raises(TierIoError, match="called with 2 keys"):
        run_virtually(watched.monitor.read(answer(outcomes), 2))
    assert watched.total == Observed(reads_failed=1)


def test_a_tier_that_cancels_a_call_itself_does_not_cancel_the_caller() -> None:
    async def cancelled() -> list[WriteOutcome]:
        raise asyncio.CancelledError

    watched = Watched()
    with pytest.raises(TierIoError, match="itself has cancelled a call"):
        run_virtually(watched.monitor.write(cancelled(), 1))
    assert watched.total == Observed(writes_failed=1)


def test_every_late_period_is_a_failure_and_a_late_end_is_not_a_success() -> None:
    watched = Watched()
    assert run_virtually(watched.monitor.read(answer([OK], 3.5), 1)) == [OK]
    assert watched.total == Observed(reads_failed=3)
    watched = Watched()
    assert run_virtually(watched.monitor.write(written([GOOD], 3.5), 1)) == [GOOD]
    assert watched.total == Observed(writes_failed=3)


def test_a_deletion_in_time_says_nothing_about_health() -> None:
    watched = Watched()
    run_virtually(watched.monitor.change(asyncio.sleep(0.5)))
    assert watched.seen == []


def test_an_operation_that_never_ends_is_no_longer_reported() -> None:
    watched = Watched()

    async def hang() -> None:
        reading = asyncio.ensure_future(watched.monitor.read(answer([OK], 1e6), 1))
        await asyncio.sleep(1000.0)
        assert not reading.done(), "the operation may still use its buffers"
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled()

    run_virtually(hang())
    assert watched.total == Observed(reads_failed=LATE_REPORTS_MAX)


def test_cancelling_the_call_cancels_the_operation() -> None:
    ended = []

    async def operation() -> list[ReadOutcome]:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(True)
        return [OK]

    async def cancel() -> None:
        reading = asyncio.ensure_future(Watched().monitor.read(operation(), 1))
        await asyncio.sleep(0.5)
        reading.cancel()
        await asyncio.wait({reading})
        await asyncio.sleep(0)
        assert ended == [True]

    run_virtually(cancel())

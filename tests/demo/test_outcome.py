"""The conclusions that the demos draw from answers and metrics, tested with invented answers and
metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from demo import __main__ as plain
from demo import shared
from demo.server import Answer
from demo.sources import Compared, Sources, load_failures
from demo.talk import COLUMNS_MIN, Row, compare, make_table

ALL_EQUAL = Compared(equal=1234, different=0, unknown=0)
Verdict = Callable[[list[Row], Compared], list[str]]


def row(phase: str, turn: int, cpu: int = 0, disk: int = 0) -> Row:
    return Row(phase, turn, 600, Sources(24, 0, cpu, disk), 0.010, 0.020, True)


PLAIN = [row("conversation", 1), row("cache emptied", 1, cpu=576), row("restarted", 1, disk=560)]
SHARED = [row("first server", 1), row("second server", 1, disk=576), row("master killed", 1, 576)]
DEMOS = pytest.mark.parametrize(
    ("verdict", "rows"), [(plain.verdict, PLAIN), (shared.verdict, SHARED)], ids=["plain", "shared"]
)


def answer(cached_tokens: int, *tokens: int) -> Answer:
    return Answer(600, cached_tokens, tokens, "", 0.01)


@pytest.mark.parametrize(
    ("found", "has_failed", "equal"),
    [
        (answer(576, 1, 2), False, True),
        (answer(576, 1, 3), False, False),
        (answer(544, 1, 3), False, None),  # other kernels may have computed the rest
        (answer(544, 1, 2), False, None),
        (answer(576, 1, 3), True, None),
    ],
)
def test_answers_are_compared_at_equal_hits_only(
    found: Answer, has_failed: bool, equal: bool | None
) -> None:
    assert compare(found, answer(576, 1, 2), has_failed) is equal


def test_failed_loads_are_found_under_their_metric() -> None:
    from offload.telemetry.metrics import METRICS

    name = METRICS["load_failures"].shown_as("load_failures")
    assert load_failures({name: 3.0}) == 3
    assert load_failures({}) == 0


@DEMOS
def test_a_good_run_has_no_problem(verdict: Verdict, rows: list[Row]) -> None:
    assert verdict(rows, ALL_EQUAL) == []


@DEMOS
@pytest.mark.parametrize("number", range(3))
def test_other_tokens_are_a_problem_in_every_phase(
    verdict: Verdict, rows: list[Row], number: int
) -> None:
    wrong = [replace(one, tokens_equal=one is not rows[number]) for one in rows]
    [problem] = verdict(wrong, ALL_EQUAL)
    assert problem == f"{rows[number].phase}, turn 1: other tokens than plain vLLM"


@DEMOS
def test_an_answer_that_cannot_be_compared_is_not_a_problem_if_others_can(
    verdict: Verdict, rows: list[Row]
) -> None:
    uncompared = [replace(one, turn=2, tokens_equal=None) for one in rows]
    assert verdict([*rows, *uncompared], ALL_EQUAL) == []
    [problem] = verdict([*rows[:2], uncompared[2]], ALL_EQUAL)
    assert problem == f"{rows[2].phase}: no answer could be compared with one of plain vLLM"


@DEMOS
@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (Compared(5, 1, 0), "1 restored blocks differ from what was computed"),
        (Compared(5, 0, 1), "were not all compared"),
        (Compared(0, 0, 0), "were not all compared"),
    ],
)
def test_blocks_that_differ_or_were_not_compared_are_a_problem(
    verdict: Verdict, rows: list[Row], compared: Compared, words: str
) -> None:
    [problem] = verdict(rows, compared)
    assert words in problem


@DEMOS
def test_nothing_restored_is_a_problem(verdict: Verdict, rows: list[Row]) -> None:
    """Tokens from the lower tier before a restart, or on the first server, prove nothing."""
    elsewhere = replace(rows[0], sources=Sources(0, 0, 576, 576))
    nothing = [replace(one, sources=Sources(600, 0, 0, 0)) for one in rows[1:]]
    [problem] = verdict([elsewhere, *nothing], ALL_EQUAL)
    assert "restored nothing" in problem or "nothing was restored from the disk" in problem


def test_nothing_from_the_cpu_tier_is_a_problem() -> None:
    rows = [replace(one, sources=replace(one.sources, cpu=0)) for one in PLAIN]
    assert plain.verdict(rows, ALL_EQUAL) == ["nothing was restored from the CPU tier"]


def test_the_last_sentence_states_what_was_shown() -> None:
    assert plain.conclusion(PLAIN, ALL_EQUAL) == (
        "Result: 576 prompt tokens came back from the CPU tier and, after a restart, 560 from the "
        "disk tier; every answer has the tokens of vLLM without offloading, and all 1,234 restored "
        "blocks have the bytes that were computed."
    )
    assert shared.conclusion(SHARED, ALL_EQUAL) == (
        "Result: a second server restored 576 prompt tokens that only the first had computed, and "
        "answered while the store's master was dead; every answer has the tokens of vLLM without "
        "offloading, and all 1,234 restored blocks have the bytes that were computed."
    )
    some = [*PLAIN[:2], replace(PLAIN[2], tokens_equal=None)]
    assert (
        "2 of 3 answers have the tokens of vLLM without offloading (the others cannot be compared"
        in (plain.conclusion(some, ALL_EQUAL))
    )


def test_the_table_shows_which_answers_were_compared_and_how_long_they_took() -> None:
    rows = [replace(PLAIN[0], ttft_s=9.0), replace(PLAIN[1], tokens_equal=None), PLAIN[2]]
    rows.append(replace(PLAIN[2], turn=2, tokens_equal=False))
    console = Console(width=COLUMNS_MIN, file=StringIO())
    console.print(make_table(rows, ("cache emptied", "restarted")))
    text = console.file.getvalue()
    assert [text.count(words) for words in ("yes", "other hit", "NO")] == [2, 1, 1]
    assert max(map(len, text.splitlines())) <= COLUMNS_MIN
    for cell in ("conversation", "cache emptied", "restarted", "computed", "9,000"):
        assert cell in text, f"{cell} in\n{text}"
    assert "Median: 10 ms where the prompt was restored, 20 ms where it was computed" in (
        " ".join(text.split())
    )

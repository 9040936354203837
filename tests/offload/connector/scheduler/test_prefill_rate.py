"""The measured speed of computing prompts, and the tokens of those that have begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offload.connector.scheduler.prefill_rate import PrefillRate


def request(
    name: str, prompt: int, computed: int = 0, output: int = 0, *, resumable: bool = False
) -> Any:
    return SimpleNamespace(
        request_id=name,
        resumable=resumable,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_output_tokens=output,
    )


def test_a_prompt_is_measured_from_its_first_step_to_its_first_token() -> None:
    seen: list[tuple[int, float]] = []
    clock = PrefillRate(lambda tokens, seconds: seen.append((tokens, seconds)))
    one = request("a", 100, 20)
    assert not clock.scheduled(one, 5.0)
    one.num_computed_tokens = 60
    assert not clock.scheduled(one, 6.0)
    one.num_output_tokens = 1
    assert clock.scheduled(one, 7.0)
    assert seen == [(80, 2.0)]
    clock.ended(request("unknown", 9, 0, 1), 8.0)
    assert seen == [(80, 2.0)]


def test_prompts_that_have_begun_are_still_to_be_computed() -> None:
    clock = PrefillRate(lambda _tokens, _seconds: None)
    one, two = request("a", 100, 20), request("b", 50)
    clock.accepted(one, 20)
    clock.accepted(two, 10)  # vLLM's own cache has ten
    assert clock.left_tokens() == 80 + 40
    clock.step_begins()
    for each in (one, two):
        clock.scheduled(each, 1.0)
    one.num_computed_tokens, two.num_computed_tokens = 60, 50
    assert clock.left_tokens() == 40
    one.num_computed_tokens = 105  # after a preemption, outputs are computed again
    assert clock.left_tokens() == 0
    clock.ended(one, 2.0)
    two.num_computed_tokens = 0
    clock.ended(two, 2.0)
    assert clock.left_tokens() == 0


def test_waiting_for_more_of_a_streamed_prompt_is_not_computing() -> None:
    """Each part gets one token as its answer, and then the request waits for its client."""
    seen: list[tuple[int, float]] = []
    clock = PrefillRate(lambda tokens, seconds: seen.append((tokens, seconds)))
    one = request("a", 1000, resumable=True)
    clock.accepted(one, 0)
    clock.step_begins()
    assert not clock.scheduled(one, 5.0)
    one.num_computed_tokens, one.num_output_tokens = 1000, 1
    one.num_prompt_tokens, one.num_output_tokens = 1500, 0
    clock.accepted(one, 1000)
    assert clock.left_tokens() == 500
    clock.step_begins()
    assert not clock.scheduled(one, 60.0)
    one.num_computed_tokens, one.num_output_tokens = 1500, 1
    clock.ended(one, 100.0)
    assert seen == []


def test_a_part_of_a_streamed_prompt_is_measured_from_its_own_first_step() -> None:
    seen: list[tuple[int, float]] = []
    clock = PrefillRate(lambda tokens, seconds: seen.append((tokens, seconds)))
    one = request("a", 1000, resumable=True)
    clock.scheduled(one, 5.0)
    one.num_prompt_tokens, one.num_computed_tokens = 1500, 1000
    clock.accepted(one, 1000)
    clock.scheduled(one, 60.0)
    one.num_output_tokens = 1
    assert clock.scheduled(one, 62.0)
    assert seen == [(500, 2.0)]

"""Measures how fast vLLM computes prompts, from the requests' point of view, and how much it still
has to compute before it begins with another prompt.

Separate from the scheduler side, because it also follows requests that load and store nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PrefillRate:
    """Measures each request from the step that first computes it until its first output token.

    ``observe(tokens, seconds)`` receives the number of tokens that were computed in that time.
    """

    def __init__(self, observe: Callable[[int, float], None]) -> None:
        self._observe = observe
        self._running: dict[str, tuple[float, int, Request]] = {}
        self._accepted: list[tuple[Request, int]] = []

    def accepted(self, request: Request, computed_tokens: int) -> None:
        """Record that vLLM will compute the request in the coming step, from this token on. It may
        have begun before: it was preempted, or the client has sent more of a streamed prompt."""
        self._running.pop(request.request_id, None)  # measure again
        self._accepted.append((request, computed_tokens))

    def step_begins(self) -> None:
        """Record that the requests accepted so far are part of the step that begins."""
        self._accepted.clear()

    def left_tokens(self) -> int:
        """The prompt tokens that requests which have begun still have to compute."""
        running = (
            request.num_prompt_tokens - request.num_computed_tokens
            for _, _, request in self._running.values()
        )
        accepted = (request.num_prompt_tokens - computed for request, computed in self._accepted)
        return sum(left for left in (*running, *accepted) if left > 0)

    def scheduled(self, request: Request, now: float) -> bool:
        """Record that the request is part of the step that begins at ``now`` (monotonic seconds).

        Returns whether the request has its first token, after which no further call is needed.
        """
        if request.num_output_tokens:
            self._finish(request, now)
            return True
        if request.request_id not in self._running:
            self._running[request.request_id] = (now, request.num_computed_tokens, request)
        return False

    def ended(self, request: Request, now: float) -> None:
        """End the measurement, because the request has ended. A streamed prompt ends when its
        client closes it, long after its last token was computed."""
        if request.resumable:
            self._running.pop(request.request_id, None)
        else:
            self._finish(request, now)

    def _finish(self, request: Request, now: float) -> None:
        started = self._running.pop(request.request_id, None)
        if started is not None and request.num_output_tokens:
            since, computed, _ = started
            self._observe(request.num_prompt_tokens - computed, now - since)

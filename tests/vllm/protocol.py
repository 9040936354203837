"""Messages between a test process and an engine process. This module imports neither vllm nor
torch."""

from __future__ import annotations

from dataclasses import dataclass

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt. Two answers are equal only if tokens and all log-probabilities are
    equal to the last bit; ``cached_tokens`` is not compared."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """Per generated token the ``(token, log-probability)`` pairs that vLLM returned, sorted."""
    cached_tokens: int
    """Prompt tokens that were not computed: vLLM's own prefix cache and the connector together."""
    finish_reason: str | None

    def same_output(self, other: Generation) -> bool:
        """True if tokens and log-probabilities are equal to the last bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


@dataclass(frozen=True, slots=True)
class StartEngine:
    """The order for a new engine process; the file descriptors are sent with it."""

    env: dict[str, str]
    engine_kwargs: dict[str, object]


@dataclass(frozen=True, slots=True)
class Call:
    """One method of the engine host to run."""

    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of the call: a value, or the text of a traceback."""

    value: object
    error: str | None = None

"""The places where a feature of vLLM acts in a world of the scheduler oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.oracle.forward import Running

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine


class Feature:
    """A feature that changes nothing. Each method is a place where a feature may act. The world's
    scheduler exists when a feature is made."""

    def __init__(self, world: MixedEngine) -> None:
        self.world = world
        self.random = world.random

    # -- a request -------------------------------------------------------------------------------

    def prompt(self, name: str, prompt: list[int]) -> list[int]:
        """The prompt that vLLM gets instead of this one."""
        return prompt

    def sampling(self, name: str) -> dict[str, Any]:
        """More sampling parameters of a request."""
        return {}

    def arguments(self, name: str) -> dict[str, Any]:
        """More arguments of vLLM's request."""
        return {}

    def made(self, request: Request) -> None:
        """Record a request that will be added."""

    def sent(self, request: Request) -> Any:
        """The sequence that later prompts may begin with, or None for the request's own tokens."""
        return None

    # -- the server ------------------------------------------------------------------------------

    def act(self) -> None:
        """Act between two steps, as an operator may."""

    def resume(self) -> None:
        """Let the server serve from now on."""

    def emptied(self) -> None:
        """Record that vLLM's own cache was emptied, and that all requests will restart."""

    def weights_changed(self) -> None:
        """Record that all caches were emptied."""

    def before_step(self) -> None:
        """Act before vLLM schedules a step."""

    def skips_step(self) -> bool:
        """True if vLLM schedules no step now."""
        return False

    # -- the model runner ------------------------------------------------------------------------

    def prefix(self, name: str) -> str:
        """Everything beside tokens, weights and salt on which the KV of a request that begins or
        resumes depends."""
        return ""

    def content(self, name: str, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as the model sees them."""
        return tokens

    def started(self, name: str, run: Running) -> None:
        """Record a request that has begun to run."""

    def submitted(self, scheduled: SchedulerOutput) -> None:
        """Record a step that the model runner gets."""

    def computes(self, name: str, start: int, end: int) -> None:
        """Check the tokens of a request that a step computes."""

    def before_sampling(self, scheduled: SchedulerOutput) -> None:
        """Act after the forward pass of this step."""

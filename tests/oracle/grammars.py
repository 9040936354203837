"""Structured output in a world of the scheduler oracle.

A grammar forbids a quarter of all tokens at each position, so vLLM drops draft tokens. Requests
wait in the queue until their grammar has been compiled, which can fail; few grammars reject what
was sampled, and vLLM ends their requests.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tests.oracle.features import Feature
from tests.oracle.forward import VOCABULARY, Running

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine


def _allows(position: int, token: int) -> bool:
    return (position + token) % 4 != 0


def nearest_allowed(position: int, token: int) -> int:
    """The token that a constrained model samples at this position, if it would else sample
    ``token``."""
    while not _allows(position, token):
        token = (token + 1) % VOCABULARY
    return token


class Grammar(StructuredOutputGrammar):
    """The grammar of an answer that begins at ``position``. It accepts nothing from ``end`` on."""

    def __init__(self, position: int, end: int) -> None:
        self._position = position
        self._end = end

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        assert self.validate_tokens(tokens) == tokens, f"{request_id} sampled {tokens}"
        self._position += len(tokens)
        return self._position <= self._end

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        for at, token in enumerate(tokens):
            if not _allows(self._position + at, token):
                return tokens[:at]
        return tokens

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        raise NotImplementedError

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        raise NotImplementedError


class Grammars(Feature):
    """About half of the requests have a grammar."""

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self._constrained: set[str] = set()
        self._compiling: list[tuple[Request, Future[StructuredOutputGrammar]]] = []

    def sampling(self, name: str) -> dict[str, Any]:
        if self.random.random() < 0.5:
            return {}
        self._constrained.add(name)
        return {"structured_outputs": StructuredOutputsParams(json_object=True)}

    def made(self, request: Request) -> None:
        if request.structured_output_request is not None:
            compiled: Future[StructuredOutputGrammar] = Future()
            request.structured_output_request.grammar = compiled
            self._compiling.append((request, compiled))

    def before_step(self) -> None:
        for request, compiled in list(self._compiling):
            if self.random.random() < 0.3:
                self._compiling.remove((request, compiled))
                self._compiled(request, compiled)

    def _compiled(self, request: Request, compiled: Future[StructuredOutputGrammar]) -> None:
        chance = self.random.random()
        if chance < 0.05:
            compiled.set_exception(ValueError("no grammar"))
            self.world.seen["no grammar"] += 1
            return
        start = request.num_prompt_tokens
        end = start + self.random.randrange(12) if chance < 0.1 else start + request.max_tokens
        compiled.set_result(Grammar(start, end))
        self.world.seen["grammars"] += 1

    # -- the model runner ------------------------------------------------------------------------

    def started(self, name: str, run: Running) -> None:
        if name in self._constrained:
            run.constrain = nearest_allowed

    def before_sampling(self, scheduled: SchedulerOutput) -> None:
        """With asynchronous scheduling, vLLM processes the output of the previous step before it
        samples with a grammar (``EngineCore.step_with_batch_queue``)."""
        queue = self.world._queue
        if not (scheduled.pending_structured_output_tokens and queue):
            return
        drafts = queue[0].drafts
        self.world._take_output()
        self.world.seen["sampled late"] += 1
        if drafts is not None:
            copies = [list(tokens) for tokens in drafts.draft_token_ids]
            copied = DraftTokenIds(list(drafts.req_ids), copies)
            self.world.scheduler.update_draft_token_ids_in_output(copied, scheduled)
            rejected = scheduled.num_invalid_spec_tokens or {}
            self.world.seen["rejected drafts"] += sum(rejected.values())

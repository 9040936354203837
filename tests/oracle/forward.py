"""The forward pass of the oracle's world: checks every byte that the computation would read, writes
bytes that follow from the prefix, and moves recurrent states as vLLM's kernels do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from tests.oracle.memory import KvMemory, Prefix
from tests.oracle.models import OracleModel

VOCABULARY = 97


@dataclass
class Running:
    """The model runner's state of a request."""

    tokens: list[int]
    tables: list[list[int]]
    prefix: Prefix
    computed_at_start: int = 0
    guesses: frozenset[int] = frozenset()
    """Digests that may be in the draft head's last slots and may turn out to be wrong."""
    state_column: int | None = None
    accepted: int = 1
    """For states with drafts: the column in which the running state begins, and which of its
    columns is valid."""
    proposed: list[int] = field(default_factory=list)
    """The tokens drafted for the next step."""
    constrain: Callable[[int, int], int] = lambda position, token: token
    """The token that is sampled at a position instead of this one."""
    restored: range = range(0)
    """The tokens that the tiers have restored for the next step."""


@dataclass(frozen=True)
class _Part:
    """The part of one request in a step: the first token that the step computes, its drafts, and
    the tokens that the tiers have restored for it."""

    start: int
    drafted: list[int]
    restored: range


def _parts_of(scheduled: SchedulerOutput, runs: dict[str, Running]) -> dict[str, _Part]:
    """The part of each request, as the model runner knows it.

    With asynchronous scheduling the scheduler does not know the drafts of the previous step, nor
    how many of them were accepted: it counts all as accepted and leaves -1 for each new draft.
    """
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    parts = {}
    for name in scheduled.num_scheduled_tokens:
        run, drafted = runs[name], scheduled.scheduled_spec_decode_tokens.get(name, [])
        if run.proposed and all(token == -1 for token in drafted):
            drafted = run.proposed[: len(drafted)]
        parts[name] = _Part(min(computed[name], len(run.tokens) - 1), drafted, run.restored)
        run.restored = range(0)
    return parts


class ForwardPass:
    """``runs`` are the requests of the batch by name; wrong bytes that were read are added to
    ``mismatches``. ``known`` are digests of prefixes that a draft head may find in a block. A step
    calls ``begin``, ``run`` and ``draft``; ``sampled`` are its tokens, ``drafts`` the proposals for
    the next step.

    With ``vllm_errs``, vLLM may continue a request from wrong KV. A step that reads wrong bytes
    then writes wrong ones and counts as one of the ``errors``; only restored tokens must be right.
    ``forgets_accepted``: a request that skips a step continues from the state after the first token
    of its last step (Model Runner V1)."""

    def __init__(
        self,
        model: OracleModel,
        memory: KvMemory,
        rng: random.Random,
        runs: dict[str, Running],
        mismatches: list[str],
    ) -> None:
        self.known: set[int] = set()
        self.sampled: dict[str, list[int]] = {}
        self.drafts: DraftTokenIds | None = None
        self.vllm_errs = self.forgets_accepted = False
        self.errors = 0
        self._model = model
        self._memory = memory
        self._random = rng
        self._runs = runs
        self._mismatches = mismatches

    def begin(self, scheduled: SchedulerOutput, launch: Callable[..., None]) -> None:
        """Moves recurrent states, as vLLM does before the forward pass. Model Runner V2 does so
        before it calls the connector."""
        self._scheduled, self._launch = scheduled, launch
        self.sampled, self.drafts = {}, None
        if self.forgets_accepted:
            for name in self._runs.keys() - scheduled.num_scheduled_tokens.keys():
                self._runs[name].accepted = 1
        self._parts = _parts_of(scheduled, self._runs)
        for name, count in scheduled.num_scheduled_tokens.items():
            tables = [list(table) for table in self._runs[name].tables]
            self._move_states(self._runs[name], tables, self._parts[name].start, count, launch)

    def first_computed(self, name: str) -> int:
        """The first token of a request that the step computes."""
        return self._parts[name].start

    def run(self) -> None:
        """Run the model and sample."""
        launch, sampled = self._launch, self.sampled
        for name, count in self._scheduled.num_scheduled_tokens.items():
            run, start = self._runs[name], self._parts[name].start
            drafted = self._parts[name].drafted
            tokens = (run.tokens + drafted)[: start + count]
            digests = run.prefix.digests(tokens).copy()
            tables = [list(table) for table in run.tables]
            launch(partial(self._kernel, name, tables, digests, self._parts[name]))
            sampled[name] = self._sample(run, drafted, start + count)
            self._run_states(name, tables, digests, len(sampled[name]))

    def draft(self) -> None:
        """Run the drafter."""
        if not self._model.drafts:
            return
        proposals = []
        for name, found in self.sampled.items():
            run, start = self._runs[name], self._parts[name].start
            run.proposed = self._propose(run)
            proposals.append(run.proposed)
            if self._model.draft_head:
                end = start + self._scheduled.num_scheduled_tokens[name]
                end = len(run.tokens) - 1 if found else end
                self._run_head(name, run.proposed, start, end, self._launch)
        self.drafts = DraftTokenIds(list(self.sampled), proposals)

    def _run_head(
        self, name: str, guesses: list[int], start: int, end: int, launch: Callable[..., None]
    ) -> None:
        """Run the draft head over the accepted tokens. Run it again over tokens whose slots were
        filled from rejected guesses. Do not write tokens of the shared prefix."""
        run = self._runs[name]
        tables = [list(table) for table in run.tables]
        digests = run.prefix.digests(run.tokens + guesses).copy()
        self.known.update(digests[: len(run.tokens)].tolist())
        run.guesses = frozenset(digests[len(run.tokens) :].tolist())
        first = max(run.computed_at_start, start - self._model.drafts)

        def kernel() -> None:
            alive = set().union(*(other.guesses for other in self._runs.values()))

            def known(digest: int) -> bool:
                return digest in self.known or digest in alive

            wrong = self._memory.check_heads(tables, digests, first, known)
            self._mismatches += [f"request {name} reads {what} wrong" for what in wrong]
            self._memory.write_heads(tables, digests, first, end)

        launch(kernel)

    def _move_states(
        self, run: Running, tables: list[list[int]], start: int, count: int, launch: Any
    ) -> None:
        """Before the forward pass, like ``preprocess_mamba``: move the valid state to the column in
        which this step begins."""
        if not self._model.drafts:
            return
        tokens = self._model.block_tokens
        column = -(-(start + count) // tokens) - 1
        before = run.state_column if run.state_column is not None else (start - 1) // tokens
        if before not in (-1, column):
            launch(partial(self._memory.copy_states, tables, before + run.accepted - 1, column))
            run.accepted = 1
        run.state_column = column

    def _run_states(
        self,
        name: str,
        tables: list[list[int]],
        digests: np.ndarray,
        sampled: int,
    ) -> None:
        """Write the state after each drafted token. Then, like ``postprocess_mamba_fused_kernel``,
        copy the state at a block's end to the place where it is cached."""
        if not self._model.drafts:
            return
        run, part = self._runs[name], self._parts[name]
        column, accepted = run.state_column, run.accepted
        first = len(digests) - 1 - len(part.drafted)

        def check(first_token: int) -> list[str]:
            if part.start <= first_token:
                return []
            right = digests[part.start - 1 : part.start]
            return self._memory.check_states(tables, column + accepted - 1, right)

        def kernel() -> None:
            written = self._checked(name, digests, check, part.restored)
            self._memory.write_states(tables, column, written[first:])

        self._launch(kernel)
        run.accepted = max(1, sampled)
        tokens = self._model.block_tokens
        aligned = (first + run.accepted) // tokens * tokens
        if aligned > first:
            source, target = column + aligned - first - 1, aligned // tokens - 1
            if column == target:
                run.accepted = 1
            self._launch(partial(self._memory.copy_states, tables, source, target))

    def _kernel(self, name: str, tables: list[list[int]], digests: np.ndarray, part: _Part) -> None:
        check = partial(self._memory.check, tables, digests, part.start)
        written = self._checked(name, digests, check, part.restored)
        self._memory.write(tables, written, part.start)

    def _checked(
        self,
        name: str,
        digests: np.ndarray,
        check: Callable[[int], list[str]],
        restored: range,
    ) -> np.ndarray:
        """Check what a step reads; ``check`` returns the errors from a token on. Returns the
        digests that the step writes."""
        wrong = check(0)
        may_err = self.vllm_errs and wrong
        if may_err:
            self.errors += 1
            wrong = check(restored.start) if restored else []
        self._mismatches += [f"request {name} reads {what} wrong" for what in wrong]
        return digests ^ np.uint64(1 << 63) if may_err else digests

    def _sample(self, run: Running, drafted: list[int], end: int) -> list[int]:
        """Returns the next tokens, including drafted ones as long as they are right; none within a
        prompt."""
        if end < len(run.tokens):
            return []
        found: list[int] = []
        for draft in [*drafted, -1]:
            found.append(self._next(run, found))
            if found[-1] != draft:
                break
        run.tokens += found
        return found

    @staticmethod
    def _next(run: Running, more: list[int]) -> int:
        """The token that follows these tokens in every run."""
        token = int(run.prefix.digests(run.tokens + more)[-1] % VOCABULARY)
        return run.constrain(len(run.tokens) + len(more), token)

    def _propose(self, run: Running) -> list[int]:
        """Draft tokens, which are more often right than wrong."""
        found: list[int] = []
        for _ in range(self._model.drafts):
            right = self._next(run, found)
            found.append(
                right if self._random.random() < 0.7 else self._random.randrange(VOCABULARY)
            )
        return found

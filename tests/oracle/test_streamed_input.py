"""Requests with streamed input: every byte that a forward pass reads is right, in all parts of
their prompts and in other requests that begin like them.

Where vLLM itself continues a session from wrong KV, ``tests/oracle/test_wrong_kv.py`` checks that
it is not stored. So here, models with recurrent states stop at the limit of an answer only and have
no drafts, and under vLLM 0.32 models with drafts run under asynchronous scheduling only. Draft
heads are left out: vLLM keeps the slot that looked ahead to the dropped token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.connector.compat import COUNTS_DRAFTS_AFTER_STOP
from offload.connector.scheduler.block_tables import BlockTables
from offload.connector.scheduler.store_progress import StoreProgress
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions
from tests.oracle.streaming import EVENTS, StreamingEngine
from tests.oracle.test_scheduler import NO_FENCE, READS_WRONG, SEEDS, conditions_of, live

STATES = ("mamba1", "mamba1_full", "mamba1_full_match_unit")
WITHOUT_DRAFTS = tuple(name for name, model in MODELS.items() if not model.drafts)
N_GRAMS = ("full_ngram", "sliding_full_ngram")


def make_world(name: str, conditions: Conditions, folder: Path, seed: int) -> StreamingEngine:
    """Make a world of this model."""
    return StreamingEngine(MODELS[name], conditions, folder, seed, early_stops=name not in STATES)


def check(name: str, conditions: Conditions, folder: Path, seed: int) -> None:
    """Run a world, in which sessions must have continued, also where a chunk's key changed."""
    if name in N_GRAMS and COUNTS_DRAFTS_AFTER_STOP:
        conditions = dataclasses.replace(conditions, asynchronous=True)
    with make_world(name, conditions, folder, seed) as world:
        live(world, in_flight=0.5)
        missing = [event for event in EVENTS if not world.seen[event]]
        assert not missing, f"seed {seed}: {missing}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["full", "sliding_full"])
def test_every_byte_read_is_right(name: str, seed: int, tmp_path: Path) -> None:
    check(name, conditions_of(name, seed), tmp_path, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*WITHOUT_DRAFTS, *N_GRAMS])
def test_every_byte_read_is_right_with_all_models(
    name: str, seed: int, runner: int, tmp_path: Path
) -> None:
    check(name, dataclasses.replace(conditions_of(name, seed), runner=runner), tmp_path, seed)


# -- planted faults ------------------------------------------------------------------------------


def _tokens_to_come_are_stored(patch: pytest.MonkeyPatch) -> None:
    """A session that ends before its last part was computed is stored with the tokens of it."""
    ended = StoreProgress.ended

    def all_tokens(self: Any, state: Any, request: Any, limit: int, block_ids: Any) -> None:
        ended(self, state, request, request.num_tokens, block_ids)

    patch.setattr(StoreProgress, "ended", all_tokens)


def _only_first_parts_are_fenced(patch: pytest.MonkeyPatch) -> None:
    """vLLM reports a session that continues as a new request with computed tokens."""
    rewritten = BlockTables.rewritten

    def of_first_parts(self: Any, output: Any) -> Any:
        first = [new for new in output.scheduled_new_reqs if not new.num_computed_tokens]
        return rewritten(self, dataclasses.replace(output, scheduled_new_reqs=first))

    patch.setattr(BlockTables, "rewritten", of_first_parts)


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("fault", "seen"),
    [(_tokens_to_come_are_stored, READS_WRONG), (_only_first_parts_are_fenced, NO_FENCE)],
    ids=["tokens_to_come_are_stored", "only_first_parts_are_fenced"],
)
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], seen: str, asynchronous: bool, tmp_path: Path
) -> None:
    conditions = Conditions(slots=60, late=2, asynchronous=asynchronous)

    def failure(folder: Path, seed: int) -> str:
        with make_world("full", conditions, folder, seed) as world:
            try:
                live(world)
            except AssertionError as error:
                return str(error)
        return ""

    for seed in range(40):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = failure(tmp_path / f"fault {seed}", seed)
        if found:
            assert re.match(seen, found), found
            assert failure(tmp_path / "control", seed) == ""
            return
    raise AssertionError("was not detected")

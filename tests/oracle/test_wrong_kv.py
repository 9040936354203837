"""KV that vLLM computes from wrong KV is not stored, although vLLM keeps it in its own cache.

vLLM continues a session (streamed input) from wrong KV in these cases:

* Recurrent states and asynchronous scheduling: a session stops at a token that a step
  in flight has already added to the state. vLLM drops the token.
* Drafts and synchronous scheduling in vLLM 0.32: in a session, accepted drafts that come after a
  stop count as computed. The slots of the next part's first tokens then hold them.

In these worlds, wrong bytes may be read, but no wrong byte may come from the tiers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.connector.compat import COUNTS_DRAFTS_AFTER_STOP
from offload.connector.scheduler.wrong_kv import WrongKv, WrongKvCauses
from offload.layout.groups import FULL, GroupLayout, ModelLayout
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.streaming import StreamingEngine
from tests.oracle.test_scheduler import READS_WRONG, SEEDS, live

SESSIONS = [
    ("mamba1", True),
    ("mamba1_full", True),
    ("mamba1_full_match_unit", True),
    ("mamba_full_ngram", True),
    ("mamba_full_ngram", False),
    *([("full_ngram", False)] if COUNTS_DRAFTS_AFTER_STOP else []),
]
"""Models, and whether scheduling is asynchronous, with which sessions continue from wrong KV."""
QUICK = (("mamba1_full", True), ("full_ngram", False))


def _levels(cases: list[tuple[str, bool]]) -> list[Any]:
    """The cases, of which most are run at the thorough level only."""
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{'asynchronous' if case[1] else 'synchronous'}",
            marks=() if case in QUICK else pytest.mark.thorough,
        )
        for case in cases
    ]


def _conditions(asynchronous: bool, runner: int = 1) -> Conditions:
    return Conditions(slots=60, late=2, asynchronous=asynchronous, runner=runner, vllm_errs=True)


def _live(world: OracleEngine) -> None:
    live(world)
    assert world.events()["vllm_errors"] > 0
    assert sum(world.loaded().values()) > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "asynchronous"), _levels(SESSIONS))
def test_no_wrong_kv_of_sessions_is_stored(
    name: str, asynchronous: bool, seed: int, tmp_path: Path
) -> None:
    with StreamingEngine(MODELS[name], _conditions(asynchronous), tmp_path, seed) as world:
        _live(world)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "asynchronous"), SESSIONS)
def test_no_wrong_kv_of_sessions_is_stored_under_model_runner_v2(
    name: str, asynchronous: bool, seed: int, tmp_path: Path
) -> None:
    conditions = _conditions(asynchronous, runner=2)
    with StreamingEngine(MODELS[name], conditions, tmp_path, seed) as world:
        _live(world)


# -- what must not change ------------------------------------------------------------------------


CAUSES = [
    ("full", False, WrongKvCauses()),
    ("full", True, WrongKvCauses()),
    ("full_ngram", True, WrongKvCauses()),
    ("full_ngram", False, WrongKvCauses(drafts_after_stop=COUNTS_DRAFTS_AFTER_STOP)),
    ("mamba1_full", False, WrongKvCauses(states=True)),
    ("mamba_full_ngram", True, WrongKvCauses(states=True)),
]


@pytest.mark.parametrize(("name", "asynchronous", "causes"), CAUSES)
def test_sessions_are_followed_only_where_they_may_continue_from_wrong_kv(
    name: str, asynchronous: bool, causes: WrongKvCauses, tmp_path: Path
) -> None:
    with StreamingEngine(MODELS[name], _conditions(asynchronous), tmp_path, 0) as world:
        assert world.connector.serving.side._wrong_kv._causes == causes


def _totals(asynchronous: bool, folder: Path) -> dict[str, float]:
    """The counters of a world with recurrent states. Its sessions continue from right KV, because
    they stop at their limits."""
    conditions = Conditions(slots=60, late=2, asynchronous=asynchronous)
    with StreamingEngine(MODELS["mamba1_full"], conditions, folder, 0, early_stops=False) as world:
        live(world)
        found: dict[str, float] = world.planner.totals()
    return {name: value for name, value in found.items() if not name.endswith("_seconds")}


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sessions_with_right_kv_are_stored_as_before(asynchronous: bool, tmp_path: Path) -> None:
    """In the same worlds, nothing changes when no session is followed, but much does if every
    session that continues is taken for wrong."""
    with_rule = _totals(asynchronous, tmp_path / "with")
    with pytest.MonkeyPatch.context() as patch:
        _sessions_are_not_followed(patch)
        assert _totals(asynchronous, tmp_path / "without") == with_rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WrongKv, "_first_wrong", lambda _, one: one.request.num_computed_tokens)
        assert _totals(asynchronous, tmp_path / "wide") != with_rule


def test_hashes_that_vllms_cache_can_no_longer_hold_are_forgotten() -> None:
    layout = ModelLayout(2, 4, 4, (GroupLayout(0, FULL, 4, 1, ("full",)),))
    wrong = WrongKv(layout, WrongKvCauses())
    for block_hash in (b"a", b"b", b"c", b"d", b"a", b"e"):
        wrong._mark(block_hash)
    assert list(wrong._marked) == [b"c", b"d", b"a", b"e"]


# -- planted faults ------------------------------------------------------------------------------


def _sessions_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WrongKv, "begin", lambda self, state, request: None)


def _only_the_session_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    """Requests that hit the session's blocks in vLLM's own cache are stored."""
    patch.setattr(WrongKv, "_mark", lambda self, block_hash: None)


def _failure(world: OracleEngine) -> str:
    with world:
        try:
            live(world)
        except AssertionError as error:
            return str(error)
    return ""


FAULTS = [
    (fault, *case)
    for fault in (_sessions_are_not_followed, _only_the_session_is_not_stored)
    for case in SESSIONS
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "name", "asynchronous"),
    [
        pytest.param(
            *each,
            id=f"{each[0].__name__.strip('_')}-{each[1]}-"
            f"{'asynchronous' if each[2] else 'synchronous'}",
        )
        for each in FAULTS
    ],
)
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None],
    name: str,
    asynchronous: bool,
    tmp_path: Path,
) -> None:
    conditions = _conditions(asynchronous)
    for seed in range(40):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = _failure(
                StreamingEngine(MODELS[name], conditions, tmp_path / f"fault {seed}", seed)
            )
        if found:
            assert re.match(READS_WRONG, found), found
            assert (
                _failure(StreamingEngine(MODELS[name], conditions, tmp_path / "control", seed))
                == ""
            )
            return
    raise AssertionError("was not detected")

"""Worlds with priorities, long prompts, adapters, images, grammars, pauses and clients' controls:
what happens in them, and that faults are detected in each. ``test_scheduler.py`` draws the features
of its worlds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.connector.model.adapters import AdapterWatch
from offload.connector.scheduler.block_tables import BlockTables
from offload.connector.scheduler.store_progress import StoreProgress
from offload.planner.planner import Planner
from tests.oracle.mixed import FEATURES, MixedEngine
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions
from tests.oracle.test_scheduler import NO_FENCE, READS_WRONG, _posted_with_the_results, live

LONG = "long_prompts"
PAUSED = ("pause: abort", "pause: wait", "pause: keep", "steps skipped")
EVENTS = {
    "adapters": ("adapters", "replaced"),
    "images": ("images", "encoded", "begun inside"),
    "grammars": ("grammars", "no grammar"),
    "pauses": PAUSED,
    "controls": ("controls",),
}
"""The events that worlds with a feature must see."""


def with_features(asynchronous: bool, *features: str) -> Conditions:
    """The conditions of a world with these features."""
    return Conditions(
        slots=60,
        late=2,
        asynchronous=asynchronous,
        scheduling="priority" if "priorities" in features else "fcfs",
        long_prefill=5 if LONG in features else 0,
        loras=2 if "adapters" in features else 0,
        features=tuple(each for each in features if each in FEATURES),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_worlds_cover_what_features_do(asynchronous: bool, tmp_path: Path) -> None:
    """All features at once, with drafts."""
    conditions = with_features(asynchronous, LONG, *FEATURES)
    seen: Counter[str] = Counter()
    events = [event for events in EVENTS.values() for event in events]
    if asynchronous:
        events += ["sampled late", "rejected drafts"]
    for seed in range(6):
        with MixedEngine(MODELS["full_ngram"], conditions, tmp_path / str(seed), seed) as world:
            live(world)
            seen += world.seen
            seen["loaded"] += int(sum(world.loaded().values()))
            seen["preempted"] += int(world.events()["preempted"])
        if all(seen[event] for event in [*events, "loaded", "preempted"]):
            return
    raise AssertionError(f"not seen: {[event for event in events if not seen[event]]}")


@pytest.mark.parametrize("feature", [LONG, "adapters"])
def test_every_byte_read_is_right_with_one_feature(feature: str, tmp_path: Path) -> None:
    seed = SHOWN_BY.get((feature, False), 0)
    with MixedEngine(MODELS["full"], with_features(False, feature), tmp_path, seed) as world:
        live(world)
        assert sum(world.loaded().values()) > 0


# -- planted faults ------------------------------------------------------------------------------


def _growing_requests_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a victim may go to a request that runs already."""
    rewritten = BlockTables.rewritten

    def of_beginnings(self: Any, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        growing = {
            block
            for name, tables in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if tables is not None and name not in cached.resumed_req_ids
            for table in tables
            for block in table
        }
        return (block for block in rewritten(self, output) if block not in growing)

    patch.setattr(BlockTables, "rewritten", of_beginnings)


def _a_step_computes_a_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    scheduled = StoreProgress.scheduled

    def whole(self: Any, output: Any, state: Any, request: Any, _: int) -> None:
        scheduled(self, output, state, request, request.num_prompt_tokens)

    patch.setattr(StoreProgress, "scheduled", whole)


def _adapters_never_change(patch: pytest.MonkeyPatch) -> None:
    """A worker copies chunks whose adapter was replaced since their request arrived."""
    patch.setattr(AdapterWatch, "agrees", lambda self, assumed: True)


def _a_pause_forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Planner, "forget_all", lambda self: None)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    (_growing_requests_are_not_fenced, "priorities", "full", NO_FENCE),
    (_a_step_computes_a_whole_prompt, LONG, "full", READS_WRONG),
    (_adapters_never_change, "adapters", "full", READS_WRONG),
    (_a_step_computes_a_whole_prompt, "images", "full", READS_WRONG),
    (_posted_with_the_results, "grammars", "full_mtp", READS_WRONG + r"draft\.0"),
    (_a_pause_forgets_nothing, "pauses", "full", READS_WRONG),
]
"""A fault, the feature of the world, its model, and the text that the failure must contain."""
SHOWN_BY = {
    ("priorities", False): 2,
    ("adapters", False): 8,
    ("adapters", True): 16,
    ("pauses", True): 3,
}
"""The seed that shows a fault, by feature and scheduler, tried first."""


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("fault", "feature", "model", "seen"),
    FAULTS,
    ids=[f"{fault.__name__.strip('_')}-{feature}" for fault, feature, *_ in FAULTS],
)
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None],
    feature: str,
    model: str,
    seen: str,
    asynchronous: bool,
    tmp_path: Path,
) -> None:
    """Each fault is detected and named, and the same world without the fault is right."""
    conditions = with_features(asynchronous, feature)

    def failure(folder: Path, seed: int) -> str:
        with MixedEngine(MODELS[model], conditions, folder, seed) as world:
            try:
                live(world)
            except AssertionError as error:
                return str(error)
        return ""

    for seed in (SHOWN_BY.get((feature, asynchronous), 0), *range(40)):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            found = failure(tmp_path / f"fault {seed}", seed)
        if found:
            assert re.match(seen, found), found
            assert failure(tmp_path / "control", seed) == ""
            return
    raise AssertionError("was not detected")

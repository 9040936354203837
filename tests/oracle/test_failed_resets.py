"""Resets that fail on the way, under vLLM's real scheduler: the tiers forget the old weights in a
later step, and are used again from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from offload.messages.plan import StepPlan
from offload.namespaces.epoch_file import EPOCH_NAME, read_epoch
from offload.planner.write_through import WriteThrough
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.sleeping import SleepingEngine
from tests.oracle.test_miss_reasons import PROMPT
from tests.oracle.test_sleep import serve

WORLDS = [(OracleEngine, "reset_cache"), (SleepingEngine, "update_connector_output")]
"""Servers that cannot and can sleep, with the hook in which they forget."""


@contextmanager
def failing(fails: Callable[[int], bool]) -> Iterator[list[int]]:
    """Let the n-th attempt to forget fail in its middle if ``fails(n)``. Yields the attempts."""
    attempts: list[int] = []
    suspend = WriteThrough.suspend

    def attempt(write_through: WriteThrough) -> None:
        attempts.append(len(attempts))
        if fails(attempts[-1]):
            raise RuntimeError("a fault in a hook")
        suspend(write_through)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteThrough, "suspend", attempt)
        yield attempts


def replace_weights(world: OracleEngine) -> None:
    """Replace the weights after a reset, even if it has failed."""
    if isinstance(world, SleepingEngine):
        world.load_weights()
        return
    done = world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not done, "the client must learn that the reset has failed"
    world.weights += 1


def assert_used_again(world: OracleEngine) -> None:
    """Blocks of the new weights reach both tiers and are loaded from there."""
    before = world.loaded().get("cpu", 0)
    serve(world, "stores", PROMPT)
    assert len(world.planner.cpu) > 0
    assert len(world.planner.lower[0]) > 0, "no epoch was begun"
    assert world.forget_locally()
    serve(world, "loads", PROMPT)
    assert world.loaded()["cpu"] > before
    assert world.mismatches == []


@pytest.mark.parametrize(("kind", "hook"), WORLDS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_later_step_forgets_what_a_reset_could_not(
    tmp_path: Path, kind: type[OracleEngine], hook: str, *, asynchronous: bool, failures: int
) -> None:
    conditions = Conditions(slots=100, late=0, asynchronous=asynchronous, fault_rate=0.0)
    with kind(MODELS["full"], conditions, tmp_path, 0) as world:
        serve(world, "old", PROMPT)
        assert len(world.planner.lower[0]) > 0
        with failing(lambda attempt: attempt < failures) as attempts:
            replace_weights(world)
            serve(world, "new", PROMPT)
        assert len(attempts) == failures + 1, "it must not forget what it stores afterwards"
        retries = {"build_connector_meta": failures - 1} if failures > 1 else {}
        assert world.connector.faults.by_hook == {hook: 1} | retries
        assert not world.connector.serving.side.is_held
        assert_used_again(world)


@pytest.mark.parametrize(("kind", "hook"), WORLDS)
def test_a_reset_that_keeps_failing_costs_only_hits(
    tmp_path: Path, kind: type[OracleEngine], hook: str
) -> None:
    """Each step's plan is sent, and few of the steps try again."""
    with kind(MODELS["full"], Conditions(slots=100, late=0, fault_rate=0.0), tmp_path, 0) as world:
        serve(world, "old", PROMPT)
        side, plans = world.connector.serving.side, 0
        build_plan, step, steps = side.build_plan, world.step, 0

        def counted_plan(output: SchedulerOutput) -> StepPlan:
            nonlocal plans
            plans += 1
            return build_plan(output)

        def counted_step() -> None:
            nonlocal steps
            steps += 1
            step()

        loaded = world.loaded()
        with failing(lambda _attempt: True) as attempts:
            replace_weights(world)
            side.build_plan, world.step = counted_plan, counted_step
            for number in range(20):
                serve(world, f"new {number}", PROMPT)
                world.forget_locally()
        assert world.loaded() == loaded, "nothing of the old weights may be hit"
        assert plans == steps > 100
        assert world.connector.faults.by_hook[hook] == 1
        assert 1 < len(attempts) <= 1 + steps.bit_length()
        while side.is_held and steps < 1000:
            serve(world, f"at step {steps}", PROMPT)
        assert_used_again(world)


def test_a_failed_reset_is_noted_on_the_disks(tmp_path: Path) -> None:
    """A server that starts after this one was killed must not find the old blocks."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        [file] = tmp_path.rglob(f"replica-0/{EPOCH_NAME}")
        assert read_epoch(file.parent) == 0
        with failing(lambda _attempt: True):
            replace_weights(world)
        assert read_epoch(file.parent) == 1

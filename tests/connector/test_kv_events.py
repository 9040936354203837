"""Who follows vLLM's KV events knows at any time which tier holds which block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from offload.connector import kv_events
from offload.connector.kv_events import KvEvents
from offload.keys import group_of
from offload.stats import PlannerStats
from tests.connector import oracle_world
from tests.connector.oracle_models import MODELS
from tests.connector.oracle_world import Conditions, World
from tests.connector.test_scheduler_oracle import live

Held = set[tuple[str, str | None, int, Any]]


class Follower:
    """Gets what vLLM publishes, as a router would, and keeps count."""

    def __init__(self, world: World) -> None:
        self.held: Held = set()
        self.cleared = self.removed = 0
        self._world = world
        world.scheduler.kv_event_publisher.publish = self.publish

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                continue  # vLLM publishes one of its own for the GPU's cache alone
            if event.medium in ("CPU", "STORAGE"):
                self._take(event)

    def _take(self, event: Any) -> None:
        named = {(event.medium, event.ownership, event.group_idx, h) for h in event.block_hashes}
        if isinstance(event, BlockStored):
            assert event.block_size > 0
            assert event.kv_cache_spec_kind
            self.held |= named
        else:
            assert isinstance(event, BlockRemoved)
            assert named <= self.held, "something was removed that was never stored"
            self.held -= named
            self.removed += len(named)

    def truth(self) -> Held:
        planner = self._world.planner
        indexes = [("CPU", None, planner.cpu)]
        indexes += [("STORAGE", index.name, index) for index in planner.lower]
        return {
            (medium, owner, group_of(key), maybe_convert_block_hash(key[:-4]))
            for medium, owner, index in indexes
            for key in index.resident
        }


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = oracle_world.make_config

    def with_events(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config, kv_cache_config

    monkeypatch.setattr(oracle_world, "make_config", with_events)


def followed(name: str, folder: Path, seed: int) -> Iterator[tuple[World, Follower]]:
    conditions = Conditions(slots=20, fault_rate=0.1)
    with World(MODELS[name], conditions, folder, seed) as world:
        world.change_weights = lambda: None  # type: ignore[method-assign]  # its own test below
        yield world, Follower(world)


def differences(name: str, folder: Path, seed: int) -> list[str]:
    for world, follower in followed(name, folder, seed):
        try:
            live(world, 150)
            world.step()
        except AssertionError as error:
            return [str(error)]
        assert follower.removed > 0, f"seed {seed}: nothing was ever evicted"
        assert follower.held, f"seed {seed}: nothing is held"
        return sorted(map(str, follower.held ^ follower.truth()))
    raise AssertionError


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["full", "sliding_full", "mamba1_full"])
def test_a_follower_knows_what_the_tiers_hold(
    name: str, seed: int, tmp_path: Path, publishing: None
) -> None:
    assert differences(name, tmp_path, seed) == []


def test_a_reset_clears_everything(tmp_path: Path, publishing: None) -> None:
    with World(MODELS["full"], Conditions(slots=20), tmp_path, 1) as world:
        live(world, 60)
        batches: list[Any] = []
        world.scheduler.kv_event_publisher.publish = batches.append
        world.change_weights()
        assert world.weights == 1
        world.step()
        events = [event for batch in batches for event in batch.events]
        ours = [*world.connector._events.take(), *events]
        assert any(isinstance(event, AllBlocksCleared) for event in ours)
        assert not any(getattr(event, "medium", "") == "CPU" for event in ours)


def test_nothing_is_collected_unless_vllm_publishes(tmp_path: Path) -> None:
    with World(MODELS["full"], Conditions(slots=20), tmp_path, 1) as world:
        live(world, 30)
        assert world.connector._events is None
        assert list(world.connector.take_events()) == []


def test_what_nobody_takes_is_bounded(
    tmp_path: Path, publishing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(MODELS["full"], Conditions(slots=20), tmp_path, 1) as world:
        monkeypatch.setattr(kv_events, "WAITING_MOST", 10)
        events: KvEvents = world.connector._events  # type: ignore[assignment]  # it is set here
        events.take()
        for number in range(30):
            events.stored(-1, [number.to_bytes(32, "big") + bytes(4)])
        assert events.lost == 20
        assert len(events.take()) == 10
        events.removed(-1, [bytes(36)])
        assert len(events.take()) == 1


def _removals_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvEvents, "removed", lambda self, tier, keys: None)


def _promotions_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannerStats, "promoted", lambda self, keys: None)


@pytest.mark.parametrize("fault", [_removals_lost, _promotions_lost])
def test_planted_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, publishing: None
) -> None:
    for seed in range(3):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                seen = differences("full", tmp_path / str(seed), seed)
            except AssertionError as error:
                seen = [str(error)]
        if seen:
            return
    raise AssertionError("went unseen")

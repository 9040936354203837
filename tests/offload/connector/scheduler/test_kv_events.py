"""A listener to vLLM's KV events knows at any time which tier holds which block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from offload.connector.scheduler import kv_events
from offload.connector.scheduler.kv_events import KvEvents
from offload.layout.keys import group_of
from offload.telemetry.counters import PlannerStats
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_scheduler import live

Held = set[tuple[str, str | None, int, Any]]


class Follower:
    """Receives what vLLM publishes, as a router would, and keeps count."""

    def __init__(self, world: OracleEngine) -> None:
        self.held: Held = set()
        self.cleared = self.removed = 0
        self._world = world
        self._clears: list[Any] = []
        self._take_events = world.connector.take_events
        world.connector.take_events = self.taking  # type: ignore[method-assign]  # to look on
        world.scheduler.kv_event_publisher.publish = self.publish

    def taking(self) -> list[Any]:
        """Marks our events that clear everything: vLLM publishes equal events that apply only to
        the GPU's cache."""
        found = list(self._take_events())
        self._clears += [event for event in found if isinstance(event, AllBlocksCleared)]
        return found

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if any(event is clear for clear in self._clears):
                self.held.clear()
                self.cleared += 1
            elif not isinstance(event, AllBlocksCleared) and event.medium in ("CPU", "STORAGE"):
                self.replay(event)

    def replay(self, event: Any) -> None:
        named = {(event.medium, event.ownership, event.group_idx, h) for h in event.block_hashes}
        if isinstance(event, BlockStored):
            assert event.block_size > 0
            assert event.kv_cache_spec_kind
            self.held |= named
        else:
            assert isinstance(event, BlockRemoved)
            unknown = named - self.held
            assert not unknown or self.cleared, "something was removed that was never stored"
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


def followed(name: str, folder: Path, seed: int) -> Iterator[tuple[OracleEngine, Follower]]:
    conditions = Conditions(slots=20, fault_rate=0.1)
    with OracleEngine(MODELS[name], conditions, folder, seed) as world:
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
def test_a_listener_knows_what_the_tiers_hold(
    name: str, seed: int, tmp_path: Path, publishing: None
) -> None:
    assert differences(name, tmp_path, seed) == []


def test_a_reset_clears_everything(tmp_path: Path, publishing: None) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path, 1) as world:
        live(world, 60)
        batches: list[Any] = []
        world.scheduler.kv_event_publisher.publish = batches.append
        before = world.weights
        world.change_weights()
        assert world.weights == before + 1
        world.step()
        events = [event for batch in batches for event in batch.events]
        ours = [*world.connector.serving.events.take(), *events]
        assert any(isinstance(event, AllBlocksCleared) for event in ours)
        assert not any(getattr(event, "medium", "") == "CPU" for event in ours)


def test_nothing_is_collected_unless_vllm_publishes(tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=20), tmp_path, 1) as world:
        live(world, 30)
        assert world.connector.serving.events is None
        assert list(world.connector.take_events()) == []


def chunks(events: list[Any]) -> int:
    return sum(len(getattr(event, "block_hashes", ())) for event in events)


def portions_of(events: KvEvents) -> list[int]:
    """The number of chunks in the events of each call."""
    portions: list[int] = []
    take = events.take

    def counting() -> list[Any]:
        found = take()
        portions.append(chunks(found))
        return found

    events.take = counting  # type: ignore[method-assign]  # to look on
    return portions


def differences_after_losses(folder: Path, seed: int = 3) -> list[str]:
    """The difference between the tiers' chunks and those of a listener that got all of them again,
    in portions, because too many changes waited."""
    for world, follower in followed("sliding_full", folder, seed):
        events: KvEvents = world.connector.serving.events  # type: ignore[assignment]  # it is set here
        portions = portions_of(events)
        live(world, 100)
        for _ in range(len(world.planner.lower[0]) + len(world.planner.cpu)):
            world.step()
        assert events.take() == []
        assert max(portions) == kv_events.EVENT_CHANGES_MAX
        assert events.lost > kv_events.WAITING_CHANGES_MAX
        assert follower.truth()
        return sorted(map(str, follower.held ^ follower.truth()))
    raise AssertionError


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "EVENT_CHANGES_MAX", 3)
    monkeypatch.setattr(kv_events, "EVENT_FOUND_MAX", 2)


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "WAITING_CHANGES_MAX", 12)


def test_changes_beyond_the_bound_become_a_clear_and_a_full_listing(
    tmp_path: Path, publishing: None, small_portions: None, small_bound: None
) -> None:
    assert differences_after_losses(tmp_path) == []


def differences_after_a_restart(folder: Path) -> list[str]:
    """Like ``differences_after_losses``, for chunks found at start-up; half of them are removed
    meanwhile."""
    for world, follower in followed("full", folder, 1):
        live(world, 60)
        world.drain()
        planner = world.planner
        assert world.connector.serving is not None
        events = KvEvents(world.connector.serving.side.layout, planner)
        follower.held, follower.cleared = set(), 1  # removals of unknown chunks are allowed
        portions = []
        count = len(planner.cpu) + len(planner.lower[0])
        planner.forget(list(planner.lower[0].resident)[::2])
        for _ in range(count):
            found = events.take()
            portions.append(chunks(found))
            for event in found:
                follower.replay(event)
        assert max(portions) <= kv_events.EVENT_CHANGES_MAX
        assert follower.truth()
        return sorted(map(str, follower.held ^ follower.truth()))
    raise AssertionError


def test_chunks_found_at_start_are_published_in_portions_unless_removed(
    tmp_path: Path, publishing: None, small_portions: None
) -> None:
    assert differences_after_a_restart(tmp_path) == []


def _nothing_is_cleared(patch: pytest.MonkeyPatch) -> None:
    def forget(self: KvEvents) -> None:
        self._changes.clear()
        self._waiting = 0

    patch.setattr(KvEvents, "cleared", forget)


def _nothing_is_listed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvEvents, "_resident_batches", lambda self: deque())


@pytest.mark.parametrize("fault", [_nothing_is_cleared, _nothing_is_listed_again])
def test_planted_faults_of_the_full_listing_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    publishing: None,
    small_portions: None,
    small_bound: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert differences_after_losses(tmp_path) == []


def test_without_a_check_removed_chunks_would_be_published(
    tmp_path: Path, publishing: None, small_portions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvEvents, "_still_resident", lambda self, tier, keys: keys)
    assert differences_after_a_restart(tmp_path) != []


def _removals_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvEvents, "removed", lambda self, tier, keys: None)


def _promotions_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlannerStats, "promoted", lambda self, keys: None)


@pytest.mark.parametrize(
    ("fault", "seen_as"),
    [
        (_removals_lost, "nothing was ever evicted"),
        (_promotions_lost, "something was removed that was never stored"),
    ],
)
def test_planted_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], seen_as: str, tmp_path: Path, publishing: None
) -> None:
    for seed in range(3):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                seen = differences("full", tmp_path / str(seed), seed)
            except AssertionError as error:
                seen = [str(error)]
        if seen:
            assert seen_as in seen[0], f"seed {seed}: {seen[0]}"
            return
    raise AssertionError("was not detected")

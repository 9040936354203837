"""Wherever blocks, slots and records travel, every byte that a forward pass reads is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.connector.oracle_models import MODELS
from tests.connector.oracle_world import Conditions, World


def live(world: World, steps: int) -> None:
    """Requests come, run, are aborted; caches are emptied; now and then the weights change."""
    rng = world.random
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.25 and len(world.scheduler.requests) < 8:
            world.add()
        elif chance < 0.27:
            world.abort()
        elif chance < 0.32:
            world.forget_locally()
        elif chance < 0.325:
            world.change_weights()
        world.step()
        assert world.mismatches == [], f"seed {world.seed}: {world.mismatches[:5]}"
    world.drain()


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_read_is_right(name: str, tmp_path: Path) -> None:
    world = World(MODELS[name], Conditions(fault_rate=0.05), tmp_path, seed=1)
    try:
        live(world, 300)
        world.check_idle()
        loaded = world.loaded()
    finally:
        world.close()
    assert world.finished > 5
    assert loaded["cpu"] > 0, loaded

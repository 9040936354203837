"""The oracle's world, put to sleep and woken up again, over a KV cache that is really unmapped.

    python -m tests.oracle.sleeping FOLDER SEED ...

Runs in a separate process, because access to an unmapped page ends it. vLLM's own sleep needs a
GPU; its order of calls (``EngineCore.sleep``, ``Worker.sleep``) is reproduced here: pause, reset,
wait for the device, unregister, unmap; and to wake up map, restore, and pass the same metadata
again.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from pathlib import Path

from tests import model_runner, processor

if __name__ == "__main__":
    processor.pretend()
    model_runner.pretend()  # vLLM must not have been imported yet

import pytest
import torch
from torch import nn
from vllm.v1.request import RequestStatus

from offload.connector import connector
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine

CYCLES = 20
NAMES = ("full", "sliding_full", "runner_v2_kernel_blocks")
"""Each seed uses one of them."""


class Layer(nn.Module):
    """The layer through which vLLM's list of layers leads to the model."""


class Model(nn.Module):
    """Weights that a worker holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.weight = nn.Parameter(torch.zeros(5, 3), requires_grad=False)
        self.register_buffer("scale", torch.ones(3, dtype=torch.uint8))


class SleepingEngine(OracleEngine):
    """A world whose server can sleep. ``kept`` counts the sleeps after which the tiers kept their
    chunks, ``lost`` those after which they began a new epoch."""

    kept = lost = 0
    handed_over_twice = True
    """As vLLM does from 0.33 on."""

    def _start(self) -> None:
        self.model = Model()
        self._config.model_config.enable_sleep_mode = True
        self._config.compilation_config.static_forward_context = {"layer.0": self.model.layer}
        with pytest.MonkeyPatch.context() as patch:
            # It would change vLLM's class for all tests that follow. The calls are made here.
            patch.setattr(connector, "follow_sleep", lambda: None)
            super()._start()
        self.executor.copy_pause._let_copies_go_on = self._let_copies_go_on

    def _let_copies_go_on(self) -> None:
        self._loop.turn(1)
        self.engine.advance()

    def sleep(self, *, change: bool, abort: bool) -> None:
        """Put the server to sleep at any moment and wake it up, perhaps with other weights."""
        if abort:
            for name in sorted(self.scheduler.requests):
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._reset()
        while not self.engine.compute.idle:  # vLLM waits for the device
            self.engine.advance()
        self.worker.unregister_kv_caches()
        self.worker.unregister_kv_caches()
        self._memory.unmap()
        for _ in range(self.random.randrange(30)):
            self._turn()
        if change:
            self.weights += 1
            self.model.weight[self.random.randrange(5)] += 1.0
        self._memory.map()
        self.worker.restore_kv_caches()
        if self.handed_over_twice:
            self.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def load_weights(self) -> None:
        """Replace the weights of the running server."""
        self._reset()
        self.weights += 1
        self.model.weight[0] += 1.0

    def nap(self) -> None:
        """Sleep without a change of the weights. The KV cache stays mapped."""
        self._reset()
        self.worker.unregister_kv_caches()
        self.worker.restore_kv_caches()

    def _reset(self) -> None:
        for _ in range(1000):
            self.settle()  # a pause waits for the steps in flight
            with suppress(RuntimeError):  # vLLM refuses while loads are in progress
                if self.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                ):
                    return
            self.step()
        raise AssertionError(f"seed {self.seed}: cannot fall asleep: {self._stuck()}")

    def wake(self, *, changed: bool) -> None:
        """Serve until the workers have reported their weights after the wake-up, and check the
        tiers."""
        before = set(self.planner.cpu.resident)
        side = self.connector.serving.side
        for _ in range(200):
            if not side.is_held:
                break
            if not self.scheduler.requests:
                self.add()
            self.step()
            self.check()
        assert not side.is_held, f"seed {self.seed}: no worker has answered"
        left = before & set(self.planner.cpu.resident)
        if changed:
            assert not left, f"seed {self.seed}: chunks of other weights are left"
            self.lost += 1
        else:
            assert left == before, f"seed {self.seed}: {len(before - left)} chunks were lost"
            self.kept += bool(before)


def live(world: SleepingEngine, cycles: int) -> None:
    """Requests arrive and run; in between the server sleeps. Some sleeps change the weights."""
    rng = world.random
    for cycle in range(cycles):
        for _ in range(rng.randrange(10, 40)):
            if rng.random() < 0.4 and len(world.scheduler.requests) < 8:
                world.add()
            world.step()
            world.check()
        change = cycle % 4 == 3
        world.sleep(change=change, abort=rng.random() < 0.5)
        world.wake(changed=change)
    world.drain()
    world.check_idle()


def run(folder: Path, seed: int, cycles: int = CYCLES) -> dict[str, float]:
    """One server under one seed; returns what happened."""
    rng = random.Random(f"sleep {seed}")
    name = NAMES[seed % len(NAMES)]
    conditions = Conditions(
        slots=rng.choice([30, 80]),
        late=rng.choice([6, 20]),
        asynchronous=seed % 2 == 1,
        batched_tokens=rng.choice([16, 32, 64]),
        runner=2 if name.startswith("runner_v2") else 1,
    )
    with SleepingEngine(MODELS[name], conditions, folder, seed) as world:
        live(world, cycles)
        return {"kept": world.kept, "lost": world.lost, **world.events()}


def main() -> None:
    """Run the seeds that are given, one line of JSON for each."""
    folder = Path(sys.argv[1])
    for seed in map(int, sys.argv[2:]):
        print(json.dumps({"seed": seed, **run(folder / str(seed), seed)}), flush=True)


if __name__ == "__main__":
    main()

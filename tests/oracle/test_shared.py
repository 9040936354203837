"""Engines that share a tier, each with vLLM's real scheduler.

Every byte that a forward pass reads is right, whichever engine stored it, even when their weights
change separately.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from offload.config.schema import TierConfig
from offload.connector.scheduler import scheduler_side
from offload.messages.report import PresenceReply
from offload.namespaces.epochs import TierEpochs
from offload.worker.presence_queries import PresenceQueries
from offload.worker.tier_writer import TierWriter
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_scheduler import READS_WRONG, live
from tiers.base import ReadOutcome, Tier, TierIoError
from tiers.testing.memory_tier import SharedMemory, SharedMemoryTier

PROMPT = list(range(64))
SEEDS = range(int(os.environ.get("KVTIERS_ORACLE_SEEDS", "3")))


class UnreliableSharedTier(SharedMemoryTier):
    """A slow shared tier, which sometimes cannot report its content, or has lost records that it
    reported."""

    def __init__(
        self, rng: random.Random, rate: float, memory: SharedMemory, **options: Any
    ) -> None:
        super().__init__(memory, **options)
        self._random = rng
        self._rate = rate
        self.may_reset = asyncio.Event()
        self.may_reset.set()

    async def present(self, keys: Any) -> list[bool]:
        for _ in range(self._random.randrange(8)):
            await asyncio.sleep(0)
        if self._random.random() < self._rate:
            raise TierIoError("it does not answer")
        return await super().present(keys)

    async def read(self, keys: Any, into: Any) -> list[ReadOutcome]:
        for _ in range(self._random.randrange(8)):
            await asyncio.sleep(0)
        gone = [key for key in keys if self._random.random() < self._rate]
        await self.delete(gone)
        return await super().read(keys, into)

    async def reset(self, epoch: int) -> None:
        for _ in range(self._random.randrange(40)):
            await asyncio.sleep(0)
        await self.may_reset.wait()
        await super().reset(epoch)


class Engine(OracleEngine):
    """One of several engines over a shared memory; new weights affect only this engine."""

    def __init__(
        self, number: int, memory: SharedMemory, conditions: Conditions, folder: Path, seed: int
    ) -> None:
        self.number = number
        self.memory = memory
        self.served = 0
        super().__init__(MODELS["full"], conditions, folder, seed)

    def _make_tier(self, spec: Any) -> Tier:
        rate = self._conditions.fault_rate
        return UnreliableSharedTier(self.random, rate, self.memory, namespace=b"n" * 16)

    def change_weights(self) -> None:
        before = self.weights
        super().change_weights()
        if self.weights != before == 0:
            self.weights += 100 * self.number


def two(
    folder: Path, seed: int, conditions: Conditions, lookup_timeout_s: float = 60.0
) -> tuple[Engine, Engine]:
    """Two engines over one memory, for the same prompts. Every reply that comes at all comes in
    time, even on a busy machine."""
    memory = SharedMemory(1 << 20)
    one, other = (Engine(n, memory, conditions, folder / str(n), seed) for n in (1, 2))
    for engine in (one, other):
        shared = engine.planner.presence
        shared.limits = replace(shared.limits, lookup_timeout_s=lookup_timeout_s)
    other._prompts = one._prompts = []
    return one, other


def serve_together(folder: Path, seed: int) -> tuple[Engine, Engine]:
    """The engines take turns, under one seed."""
    rng = random.Random(seed)
    slots, faults = rng.choice([12, 30]), rng.choice([0.0, 0.1])
    conditions = Conditions(slots=slots, fault_rate=faults, asynchronous=seed % 2 == 1)
    one, other = two(folder, seed, conditions)
    with one, other:
        for _ in range(8):
            for engine, next_one in ((one, other), (other, one)):
                live(engine, 20)
                next_one._prompts = list(engine._prompts)
    return one, other


def serve(engine: Engine, prompt: list[int]) -> None:
    """Serve a single request to its end."""
    request(engine, prompt)
    engine.drain()
    engine.check()


def request(engine: Engine, prompt: list[int], answer_tokens: int = 4) -> None:
    """A client's request."""
    engine.served += 1
    name = f"r100{engine.served}"
    engine._salts[name] = None
    sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0.0)
    made = Request(name, prompt, sampling, None, block_hasher=engine._hasher)
    engine.scheduler.add_request(made)


def serve_before_a_reset_is_through(folder: Path) -> None:
    """Serve the same prompt again under new weights, while the tier is still at the epoch of the
    old ones."""
    engine, other = two(folder, 1, Conditions(slots=80), lookup_timeout_s=0.05)
    with engine, other, pytest.MonkeyPatch.context() as patch:
        # for this long, the engine steps without other work
        patch.setattr(scheduler_side, "STALL_S", 0.2)
        serve(engine, PROMPT)
        tier = engine.executor._tiers[0]
        tier.may_reset.clear()
        engine.change_weights()
        request(engine, PROMPT)
        while engine.scheduler.has_requests():
            engine.step()
        tier.may_reset.set()
        engine.drain()
        engine.check_idle()


def serve_apart(folder: Path) -> None:
    """Both engines get new weights, each different ones, and compute the same prompt."""
    one, other = two(folder, 1, Conditions(slots=80))
    with one, other:
        for engine in (one, other):
            serve(engine, PROMPT)
            engine.change_weights()
        for engine in (one, other):
            serve(engine, PROMPT)
            engine.check_idle()


@pytest.fixture(autouse=True)
def _a_shared_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierConfig, "shared", True)
    # otherwise equal prompts have different keys in each engine
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_every_byte_read_is_right(tmp_path: Path) -> None:
    found = dict.fromkeys(["found_chunks:file", "unanswered_questions:file", "load_failures"], 0.0)
    weights = 0
    for seed in SEEDS:
        for engine in serve_together(tmp_path / str(seed), seed):
            assert engine.finished > 5
            assert engine.loaded()["file"] > 0, f"seed {seed}: nothing came from the shared tier"
            weights += engine.weights > 0
            for name in found:
                found[name] += engine.planner.totals()[name]
    assert all(found.values()), f"an event on which this test depends did not happen: {found}"
    assert weights


def test_engines_with_different_new_weights_do_not_share(tmp_path: Path) -> None:
    serve_apart(tmp_path)


def test_an_idle_engine_restores_what_another_has_stored(tmp_path: Path) -> None:
    """The request waits for the reply, and the engine keeps stepping meanwhile."""
    one, other = two(tmp_path, 1, Conditions(slots=80))
    with one, other:
        serve(one, PROMPT)
        serve(other, PROMPT)
        other.check_idle()
        assert other.loaded()["file"] > 0, "nothing came"
        assert other.planner.totals()["lookup_timeouts"] == 0


def test_what_another_engine_has_stored_is_read_ahead(tmp_path: Path) -> None:
    """vLLM looks up no waiting request while others take all its places, but the planner reads
    for it."""
    one, other = two(tmp_path, 2, Conditions(slots=200))
    with one, other:
        serve(one, PROMPT)
        for number in range(4):
            request(other, [number + 1] * 3, answer_tokens=52)
        while len(other.scheduler.running) < 4:
            other.step()
        request(other, PROMPT)
        for _ in range(40):
            other.step()
        assert len(other.scheduler.running) == 4
        counts = other.planner.look_ahead.counts.chunks
        assert counts["read"] == 16
        other.drain()
        other.check_idle()
        assert counts["used"] == 16
        assert other.loaded() == {"cpu": 64, "file": 0}
        assert other.planner.totals()["lookup_timeouts"] == 0


def test_a_tier_is_not_queried_before_a_reset_is_complete(tmp_path: Path) -> None:
    serve_before_a_reset_is_through(tmp_path)


# -- planted faults ------------------------------------------------------------------------------


def test_epochs_counted_by_each_engine_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {}

    def counted(self: Any, tier: int, _noted: Any) -> int:
        numbers[id(self)] = numbers.get(id(self), -1) + 2
        return numbers[id(self)]

    monkeypatch.setattr(TierEpochs, "begin", counted)
    with pytest.raises(AssertionError, match=READS_WRONG):
        serve_apart(tmp_path)


def test_replies_from_before_the_end_of_a_reset_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierWriter, "is_behind", False)
    with pytest.raises(AssertionError, match=READS_WRONG):
        serve_before_a_reset_is_through(tmp_path)


def test_an_engine_that_never_queries_restores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: Any, query: Any) -> PresenceReply:
        return PresenceReply(None)

    monkeypatch.setattr(PresenceQueries, "answer", silent)
    with pytest.raises(AssertionError, match="nothing came"):
        test_an_idle_engine_restores_what_another_has_stored(tmp_path)

"""Invalid calls of the in-process API, and third-party tiers that misbehave: an invalid call raises
and changes nothing, and a fault ends only the operation to which it belongs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import InvariantError, TierUnavailableError
from tests.offload.small_model import (
    compute,
    keys,
    kv_caches,
    open_manager,
    simulated_engines,
    wrong_blocks,
)
from tests.sim.real_disk import OnThreads
from tests.sim.virtual_time import run_virtually
from tests.unprintable import Unprintable
from tiers.adapters.wrapper import SharedTierWrapper, TierWrapper
from tiers.base import ReadOutcome, Tier, WriteOutcome
from tiers.lmdb.tier import LmdbTier
from tiers.testing.faults import FaultTier, always
from tiers.testing.memory_tier import MemoryTier, SharedMemory, SharedMemoryTier

SOON_S = 1.0
"""Virtual seconds: no operation takes any time except those that a test lets wait."""


@pytest.fixture(autouse=True)
def _copies_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_engines(monkeypatch, automatic=True)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(scenario())


# -- invalid calls ----------------------------------------------------------------------------


WRONG_CALLS = {
    "a key twice": ([b"a", b"b", b"a"], [1, 2, 3], "occur twice: ['61']"),
    "a key twice in a long call": ([bytes([n % 20]) for n in range(21)], range(21), "occur twice"),
    "a key without bytes": ([b""], [1], "a key has 1 to 507 bytes, got some of [0]"),
    "a key of 600 bytes": ([b"a", b"b" * 600], [1, 2], "1 to 507 bytes, got some of [600]"),
    "text for a key": (["a"], [1], "keys must be bytes, got ['a']"),
    "one key for a list": (b"abc", [1, 2, 3], "a sequence of bytes objects"),
    "half a block": ([b"a"], [1.5], "block ids must be integers, got [1.5]"),
    "text for a block": ([b"a"], ["1"], "block ids must be integers, got ['1']"),
    "a block twice": ([b"a", b"b"], [3, 3], "block ids must differ within a call"),
    "a block below 0": ([b"a"], [-1], "block ids [-1] are not in"),
    "too few blocks": ([b"a", b"b"], [1], "2 keys need 2 block ids"),
    "all at once": ([b"", b"a", b"a"], [99.5, 1000], "; "),
}


@pytest.mark.parametrize("which", ["offload", "restore"])
@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_an_invalid_call_says_what_is_wrong_and_changes_nothing(which: str, wrong: str) -> None:
    names, blocks, message = WRONG_CALLS[wrong]

    async def scenario() -> None:
        caches = kv_caches()
        async with await open_manager(caches, [MemoryTier(1 << 22)]) as manager:
            with pytest.raises(ValueError, match=re.escape(message)):
                await getattr(manager, which)(names, blocks)
            assert not manager.planner.busy
            assert manager.planner.cpu.filling_count == 0
            compute(caches, [b"a", b"b"], [1, 2])
            assert await manager.offload([b"a", b"b"], [1, 2]) == 2
            assert await manager.restore([b"a", b"b"], [11, 12]) == 2
            assert wrong_blocks(caches, [b"a", b"b"], [11, 12]) == []

    run(scenario)


def test_integers_of_any_kind_are_block_ids() -> None:
    async def scenario() -> None:
        caches = kv_caches()
        async with await open_manager(caches) as manager:
            compute(caches, keys(2), [1, 2])
            blocks: Any = np.array([1, 2], dtype=np.int32)
            assert await manager.offload(keys(2), blocks) == 2
            blocks = torch.tensor([11, 12])
            assert await manager.restore(keys(2), blocks) == 2
            assert wrong_blocks(caches, keys(2), [11, 12]) == []

    run(scenario)


def test_the_longest_key_reaches_every_tier(tmp_path: Path) -> None:
    async def scenario() -> None:
        caches = kv_caches()
        disk = OnThreads(LmdbTier(tmp_path / "tier", 8 << 20, reserve_bytes=0))
        names = [b"k" * 507, b"a"]
        async with await open_manager(caches, [disk]) as manager:
            compute(caches, names, [1, 2])
            assert await manager.offload(names, [1, 2]) == 2
            await manager.flush()
            assert all(name + bytes(4) in manager.planner.lower[0] for name in names)

    run(scenario)


# -- third-party tiers ------------------------------------------------------------------------


class MisbehavingTier(FaultTier):
    """Carries out each call, but returns results that are wrong in the way ``how`` says."""

    def __init__(self, inner: Tier, method: str, how: Callable[[list[Any]], Any]) -> None:
        super().__init__(inner, always, {method})
        self.how = how
        self.is_bad = False

    async def _answer(self, method: str, found: Any) -> Any:
        if not (self.is_bad and method in self._methods):
            return found
        self.met += 1
        return self.how(found or [])

    async def write(self, names: Any, buffers: Any) -> list[WriteOutcome]:
        found: list[WriteOutcome] = await self._answer(
            "write", await self.inner.write(names, buffers)
        )
        return found

    async def read(self, names: Any, into: Any) -> list[ReadOutcome]:
        found: list[ReadOutcome] = await self._answer("read", await self.inner.read(names, into))
        return found

    async def touch(self, names: Any) -> None:
        await self.inner.touch(names)
        await self._answer("touch", [])


class MisbehavingSharedTier(SharedTierWrapper, MisbehavingTier):
    """A ``MisbehavingTier`` around a shared tier."""

    async def present(self, names: Any) -> list[bool]:
        found: list[bool] = await self._answer("present", await self.inner.present(names))
        return found


def _raises(error: type[BaseException], _found: list[Any]) -> Any:
    raise error("planted")


WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "one answer too few": lambda found: found[1:],
    "one answer too many": lambda found: [*found, *found[:1]],
    "no answer": lambda _found: None,
    "answers of another kind": lambda found: ["ok"] * len(found),
    "a generator": lambda found: (one for one in found),
    "another error": functools.partial(_raises, KeyError),
    "a cancellation": functools.partial(_raises, asyncio.CancelledError),
}


@pytest.mark.parametrize("method", ["read", "write", "present", "touch"])
@pytest.mark.parametrize("way", WAYS)
def test_a_misbehaving_tier_fails_only_that_operation(method: str, way: str) -> None:
    async def scenario() -> None:
        caches, loop = kv_caches(), asyncio.get_running_loop()
        bad: MisbehavingTier = (
            MisbehavingSharedTier(SharedMemoryTier(SharedMemory(1 << 22)), method, WAYS[way])
            if method == "present"
            else MisbehavingTier(MemoryTier(1 << 22), method, WAYS[way])
        )
        async with await open_manager(caches, [bad], slots=8) as manager:
            for start in range(0, 16, 4):
                compute(caches, keys(4, start), range(4))
                assert await manager.offload(keys(4, start), range(4)) == 4
                await manager.flush()
            bad.is_bad = True
            for start in range(100, 116, 2):
                # writes, and reads chunks that the lower tier got before
                compute(caches, keys(2, start), range(2))
                taken = await manager.offload(keys(2, start), range(2))
                again = await manager.restore(keys(2, start), [8, 9])
                assert again >= taken, "the CPU tier returns what it has stored"
                assert wrong_blocks(caches, keys(again, start), [8, 9][:again]) == []
                assert await manager.restore(keys(2, start + 500), [10, 11]) == 0, (
                    "these keys were never stored"
                )
                restored = await asyncio.gather(
                    *(manager.restore(keys(16), range(at, at + 16)) for at in (20, 40))
                )
                for at, got in zip((20, 40), restored, strict=True):
                    blocks = range(at, at + got)
                    assert wrong_blocks(caches, keys(got), blocks) == []
            assert bad.met > 0
            bad.is_bad = False
            await asyncio.sleep(300.0)  # the breaker may have opened
            for start in range(200, 208, 2):
                compute(caches, keys(2, start), range(2))
                await manager.offload(keys(2, start), range(2))
                await asyncio.sleep(60.0)
            began = loop.time()
            await manager.flush()
            assert loop.time() - began < 60.0
            assert await manager.restore(keys(2, 206), [8, 9]) == 2
            assert wrong_blocks(caches, keys(2, 206), [8, 9]) == []
            manager.planner.check()

    run(scenario)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("planted"), "'planted'"),
        (Unprintable(), r"Unprintable \(its __repr__ raises\)"),
    ],
    ids=["any error", "without a text"],
)
def test_a_tier_that_raises_anything_when_opened_is_unavailable(
    error: Exception, text: str
) -> None:
    class Odd(TierWrapper):
        async def open(self) -> Any:
            raise error

    async def scenario() -> None:
        with pytest.raises(TierUnavailableError, match=f"tier 0: {text}"):
            await open_manager(kv_caches(), [Odd(MemoryTier(1 << 22))])

    run(scenario)


@pytest.mark.parametrize("method", ["complete", "step"])
def test_one_error_of_the_planner_does_not_end_all_operations(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        caches = kv_caches()
        async with await open_manager(caches) as manager:
            real = getattr(manager.planner, method)
            calls = 0

            def planted(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise RuntimeError("planted")
                return real(*arguments, **options)

            monkeypatch.setattr(manager.planner, method, planted)
            compute(caches, keys(1), [1])
            with contextlib.suppress(RuntimeError):
                await asyncio.wait_for(manager.offload(keys(1), [1]), SOON_S)
            compute(caches, keys(1, 5), [2])
            assert await asyncio.wait_for(manager.offload(keys(1, 5), [2]), SOON_S) == 1
            assert await asyncio.wait_for(manager.restore(keys(1, 5), [3]), SOON_S) == 1
            assert wrong_blocks(caches, keys(1, 5), [3]) == []

    run(scenario)


def test_a_broken_planner_ends_calls_and_copies_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        caches = kv_caches()
        manager = await open_manager(caches, [MemoryTier(1 << 22)])
        compute(caches, keys(1), [1])
        assert await manager.offload(keys(1), [1]) == 1
        with monkeypatch.context() as patched:
            patched.setattr(manager.planner, "step", functools.partial(_raises, RuntimeError, []))
            with pytest.raises(InvariantError, match="nothing can be planned"):
                await manager.restore(keys(1), [5])
        caches["layers.0"][5] = 0xEE
        with pytest.raises(InvariantError):
            await manager.restore(keys(1), [6])
        await asyncio.sleep(SOON_S)
        assert (caches["layers.0"][5] == 0xEE).all(), "the block has a new owner"
        await manager.aclose()

    run(scenario)

"""``OffloadManager``: the offloading of one process as an asyncio API, without vLLM.

The same planner, executor and tiers as in the connector, driven by ``await`` instead of by a
scheduler's steps. One manager serves one rank. It lives on the loop on which it was opened, and
all its methods must be called there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from offload.chunks import Run
from offload.config import OffloadConfig, check_cpu_capacity, slot_counts
from offload.errors import ConfigError, TierUnavailableError
from offload.executor import Executor, ExecutorLimits
from offload.gates import GateLimits, Gates
from offload.index import TierIndex
from offload.keys import group_suffix
from offload.kv_config import KvCacheConfig, SimpleConfig, SimpleGroup, SimpleSpec
from offload.load_planner import NOBODY
from offload.load_task import io_bytes
from offload.manager_setup import group_caches, group_infos, in_process_settings, open_tier
from offload.planner import Planner
from offload.plans import JobResult, StepPlan
from offload.registry import LayerTensors, Registration, register_kv_caches
from offload.shared import SharedLimits
from offload.space import SlotSpace
from offload.tier_epochs import draw_epoch
from policies.base import AdmissionPolicy
from policies.registry import make_admission, make_policy
from tiers.base import Tier
from tiers.copy import CopyEngine
from tiers.host_copy import HostCopyEngine
from tiers.slab import HostSlab

__all__ = ["OffloadManager", "SimpleConfig", "SimpleGroup", "SimpleSpec"]

T = TypeVar("T")


class OffloadManager:
    """Offloads chunks of registered KV caches to a CPU tier and lower tiers, and restores them.

    Keys are bytes of the caller's choice, one per block, equal only for equal content (with the
    whole prefix before it). They are kept per group.
    """

    def __init__(
        self, planner: Planner, executor: Executor, slab: HostSlab, registration: Registration
    ) -> None:
        """Use ``open``."""
        self.planner = planner
        self._executor = executor
        self._slab = slab
        self._registration = registration
        self._blocks = {group.group: group.chunk_blocks for group in registration.groups}
        self._epoch = 0
        self._requests = 0
        self._jobs: dict[int, asyncio.Future[JobResult]] = {}
        self._loads: dict[str, asyncio.Future[bool]] = {}
        self._results = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        kv_cache_config: KvCacheConfig,
        kv_caches: Mapping[str, LayerTensors],
        config: Mapping[str, Any] | OffloadConfig | None = None,
        *,
        tiers: Sequence[Tier] = (),
    ) -> OffloadManager:
        """Register KV caches and open the tiers.

        ``kv_caches`` maps layer names to tensors (or lists of state tensors); ``config`` is what
        ``kv_connector_extra_config`` would hold, without ``tiers``: lower tiers are given as
        objects, nearest first. Raises ``ConfigError``, ``LayoutError`` and
        ``TierUnavailableError``, and lets go of what it had set up, tiers included, if it does.
        """
        async with contextlib.AsyncExitStack() as undo:
            manager = await cls._open(undo, kv_cache_config, kv_caches, config, tiers)
            undo.pop_all()
        return manager

    @classmethod
    async def _open(
        cls,
        undo: contextlib.AsyncExitStack,
        kv_cache_config: KvCacheConfig,
        kv_caches: Mapping[str, LayerTensors],
        config: Mapping[str, Any] | OffloadConfig | None,
        tiers: Sequence[Tier],
    ) -> OffloadManager:
        """``open``; ``undo`` is told how to let go of each step."""
        settings = in_process_settings(config)
        registration = register_kv_caches(
            kv_cache_config.num_blocks, group_caches(kv_cache_config, kv_caches, settings)
        )
        slot_bytes = max(io_bytes(group) for group in registration.groups)
        problems = check_cpu_capacity(settings, slot_bytes, 1)
        if problems:
            raise ConfigError(problems)
        slots = slot_counts(settings, slot_bytes, 1).slots
        staging = min(slots // 2, max(1, settings.staging // slot_bytes)) if tiers else 0
        device = registration.tensors[0].device
        slab = _make_slab(slot_bytes, slots, device, settings.cpu.pin)
        undo.callback(slab.close)
        engine = _make_engine(registration, slab, device)
        undo.callback(engine.close)
        groups = group_infos(kv_cache_config, registration, settings, tiers)
        cpu = TierIndex(
            "cpu",
            SlotSpace(slots - staging, staging),
            make_policy(settings.cpu.policy.spec),
        )
        opened = []
        for number, tier in enumerate(tiers):
            undo.push_async_callback(tier.aclose)
            opened.append(await open_tier(tier, number, groups))
        lower = [index for index, _ in opened]
        limits = _limits(settings)
        executor = Executor(
            slab, engine, registration.groups, tiers, staging=range(staging), limits=limits
        )
        planner = Planner(
            groups,
            cpu,
            lower,
            max_store_chunks=slots,  # callers wait, which is bound enough, here and below
            step_chunks=1 << 30,
            gates=Gates(
                [index.name for index in lower],
                GateLimits(settings.breaker_failures, break_even=False),  # callers decide
            ),
            admission=_admission(settings),
            shared=[number for number, (_, is_shared) in enumerate(opened) if is_shared],
            shared_limits=SharedLimits(settings.lookup_timeout_s, settings.remember_s),
        )
        manager = cls(planner, executor, slab, registration)
        executor.start(manager._results.set)
        manager._task = asyncio.create_task(manager._run())
        return manager

    async def __aenter__(self) -> OffloadManager:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    # -- use ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], group: int = 0) -> int:
        """How many of ``keys``, from the first on without a gap, some tier is known to give now.
        ``restore`` also asks shared tiers what nobody here knows."""
        suffix = group_suffix(group)
        present = self.planner.present
        for count, key in enumerate(keys):
            if not present(key + suffix):
                return count
        return len(keys)

    async def offload(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> int:
        """Copy blocks to the CPU tier and wait for that; lower tiers follow in the background.

        ``block_ids`` has ``chunk_blocks`` entries per key. Returns how many keys, from the first
        on, are held by a tier now; the rest found no room. The blocks may be reused afterwards,
        also when the call was cancelled: it ends only when nothing reads them any more.
        """
        run = self._wanted(keys, block_ids, group)
        settled = self.planner.plan_store(run)
        self._pump()
        await _finish(self._filled(run.keys[:settled]))
        return self.lookup(keys[:settled], group)

    async def _filled(self, keys: Sequence[bytes]) -> None:
        """Wait until no job, ours or another's, is writing these chunks any more."""
        while any(self.planner.cpu.is_filling(key) for key in keys):
            self._moved.clear()
            await self._moved.wait()

    async def restore(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> int:
        """Fill blocks with the longest prefix of ``keys`` that is held, and wait for that.

        Returns how many chunks, from the first on, are restored whole and verified; the content
        of the blocks after them is undefined.
        """
        run = self._wanted(keys, block_ids, group)
        if self.planner.shared.tiers:
            await self._ask(run.keys)
        hit = self.lookup(keys, group)
        if not hit:
            self._pump()  # time passes: a tier that is shut out may be due for a probe
            return 0
        self._requests += 1
        request = f"restore-{self._requests}"
        run = run.part(0, hit)
        self.planner.plan_load(request, [run])
        self.planner.touch(run.keys)
        ended = self._loads[request] = asyncio.get_running_loop().create_future()
        job = next(load.job for load in self._pump().loads if load.request == request)
        result = self._jobs[job]
        if await _finish(ended):
            return hit
        bad = result.result().bad if result.done() else frozenset()
        if not result.done() or result.result().failed or NOBODY.key in bad:
            return 0
        return next((n for n, key in enumerate(run.keys) if key in bad), hit)

    async def _ask(self, keys: Sequence[bytes]) -> None:
        """Let shared tiers say which of these they hold, for at most ``lookup_timeout_s``."""
        shared, loop = self.planner.shared, asyncio.get_running_loop()
        self.planner.tick(loop.time())
        wait = shared.ask([k for k in keys if not self.planner.present(k)], None, loop.time())
        self._pump()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(shared.limits.lookup_timeout_s):
                while shared.is_waiting(wait, loop.time()):
                    self._moved.clear()
                    await self._moved.wait()

    async def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything accepted so far has reached, or failed to reach, every tier.

        Raises ``TimeoutError`` if a tier takes longer; what it has accepted goes on.
        """
        async with asyncio.timeout(timeout_s):
            self._pump()
            while self.planner.busy:
                self._moved.clear()
                await self._moved.wait()
            await self._executor.settle()

    async def reset(self, timeout_s: float = 60.0) -> None:
        """Forget everything at once, in every tier, durably: the weights have changed.

        Raises ``TierUnavailableError`` if a tier could not make it durable within ``timeout_s``.
        """
        self._epoch += 1
        errors = self._executor.stats.tier_errors
        shared = self.planner.shared.tiers
        tiers = range(len(self.planner.lower))
        self.planner.reset({n: draw_epoch() if n in shared else self._epoch for n in tiers})
        self._pump()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._executor.settle(), timeout_s)
            if self._executor.stats.tier_errors == errors:
                return
        raise TierUnavailableError(
            "kvtiers: a tier could not be reset durably. Nothing of it is found any more in "
            "this process, but delete its folder before it is opened again."
        )

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Flush within ``timeout_s`` seconds, then release tiers, threads and memory."""
        task, self._task = self._task, None
        if task is None:
            return
        # What is not written in time is not there after a restart, nothing else.
        with contextlib.suppress(TimeoutError):
            await self.flush(timeout_s)
        task.cancel()
        await self._executor.aclose(timeout_s)
        self._slab.close()

    # -- inside ------------------------------------------------------------------------------

    def _wanted(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int) -> Run:
        if group not in self._blocks:
            raise ValueError(f"there is no group {group}: groups are {sorted(self._blocks)}")
        size = self._blocks[group]
        if len(block_ids) != len(keys) * size:
            raise ValueError(
                f"{len(keys)} keys need {len(keys) * size} block ids ({size} each), "
                f"got {len(block_ids)}"
            )
        bad = [b for b in block_ids if not 0 <= b < self._registration.num_blocks]
        if bad:
            raise ValueError(
                f"block ids {bad[:5]} are not in 0..{self._registration.num_blocks - 1}"
            )
        suffix = group_suffix(group)
        depths = range(1, len(keys) + 1)
        return Run([key + suffix for key in keys], group, tuple(block_ids), depths)

    def _pump(self) -> StepPlan:
        """Send what is planned to the executor."""
        loop = asyncio.get_running_loop()
        self.planner.tick(loop.time())
        plan = self.planner.step()
        for job in [*(s.job for s in plan.stores), *(load.job for load in plan.loads)]:
            self._jobs[job] = loop.create_future()
        self._executor.post(plan)
        return plan

    async def _run(self) -> None:
        """Feed what ended back to the planner, and to whoever waits."""
        while True:
            await self._results.wait()
            self._results.clear()
            drained = self._executor.drain()
            self.planner.tick(asyncio.get_running_loop().time())
            self.planner.complete(drained.report)
            for job, result in drained.report.results.items():
                future = self._jobs.pop(job, None)
                if future is not None and not future.done():
                    future.set_result(result)
            for request in drained.finished:
                ended = self._loads.pop(request, None)
                if ended is not None and not ended.done():
                    ended.set_result(request not in drained.failed)
            self._pump()
            self._moved.set()


async def _finish(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even if the caller is cancelled, and only then pass that on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _admission(config: OffloadConfig) -> AdmissionPolicy | None:
    chosen = config.cpu.admission
    return None if chosen.name == "all" else make_admission(chosen.spec)


def _limits(config: OffloadConfig) -> ExecutorLimits:
    return ExecutorLimits(config.load_timeout_s, config.fence_timeout_s, config.tier_timeout_s)


def _make_slab(slot_bytes: int, slots: int, device: torch.device, pin: str) -> HostSlab:
    if device.type != "cuda" or pin == "off":
        return HostSlab(slot_bytes, slots)
    from tiers.cuda_copy import gpu_node

    node = gpu_node(device.index)
    return HostSlab(slot_bytes, slots, pin=True, pin_fallback=pin == "prefer", numa_node=node)


def _make_engine(registration: Registration, slab: HostSlab, device: torch.device) -> CopyEngine:
    if device.type == "cuda":
        from tiers.cuda_copy import CudaCopyEngine

        return CudaCopyEngine(
            registration.groups, slab, device=device.index, num_blocks=registration.num_blocks
        )
    return HostCopyEngine(registration.groups, slab, num_blocks=registration.num_blocks)

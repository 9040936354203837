"""``OffloadManager``: offloading for one process as an asyncio API, without vLLM.

It drives the connector's planner, executor and tiers with ``await`` instead of a scheduler's steps.
One manager serves one rank. It belongs to the loop on which it was opened; call all methods on that
loop.

Owns the API for one process without vLLM.

Must not know vLLM, or a second rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from offload.config.schema import OffloadConfig
from offload.errors import InvariantError, ManagerClosedError, TierUnavailableError
from offload.index.chunk_batch import ChunkBatch
from offload.layout.keys import group_suffix
from offload.layout.kv_cache_config import KvCacheConfig, SimpleConfig, SimpleGroup, SimpleSpec
from offload.layout.prefix_match import present_in
from offload.layout.registration import LayerTensors, Registration, register_kv_caches
from offload.manager.arguments import (
    checked_batch,
    group_caches,
    group_layouts,
    in_process_settings,
)
from offload.messages.plan import StepPlan
from offload.messages.report import JobResult
from offload.namespaces.epochs import draw_epoch
from offload.planner.build import make_planner
from offload.planner.loads import MISSING_CHUNK
from offload.planner.planner import Planner
from offload.planner.work_limits import NO_LIMIT, WorkLimits
from offload.worker.executor import Executor
from offload.worker.rank_memory import make_memory
from offload.worker.runtime import UnopenedTier, open_rank
from tiers.base import Tier
from tiers.io.threads import settled
from tiers.slab.slab import HostSlab
from tiers.tally import Tally

__all__ = ["OffloadManager", "SimpleConfig", "SimpleGroup", "SimpleSpec"]

logger = logging.getLogger(__name__)

HURRIED_CLOSE_TIMEOUT_S = 2.0
"""Time limits for a hurried close: one for all work in flight together, then one per tier."""
STEP_ATTEMPTS = 3


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
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, asyncio.Future[JobResult]] = {}
        self._loads: dict[str, asyncio.Future[bool]] = {}
        self._storing: dict[bytes, asyncio.Future[JobResult]] = {}
        self._moved = asyncio.Event()
        self._is_due = False  # for a callback that processes completed work
        self._faults = Tally()
        self._is_broken = self._is_closing = False
        self._closing: asyncio.Task[None] | None = None
        self._released: asyncio.Future[None] = self._loop.create_future()

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

        ``kv_caches`` maps layer names to tensors (or lists of state tensors); ``config`` has the
        contents of ``kv_connector_extra_config``, without ``tiers``: lower tiers are passed as
        objects, nearest first. Raises ``ConfigError``, ``LayoutError``, ``CapacityError`` and
        ``TierUnavailableError``, after it has released everything that it had set up, including the
        tiers.
        """
        undo = contextlib.AsyncExitStack()
        try:
            return await cls._open(undo, kv_cache_config, kv_caches, config, tiers)
        except BaseException:  # a cancelled open releases what it has opened, too
            await settled(asyncio.ensure_future(undo.aclose()))
            raise

    @classmethod
    async def _open(
        cls,
        undo: contextlib.AsyncExitStack,
        kv_cache_config: KvCacheConfig,
        kv_caches: Mapping[str, LayerTensors],
        config: Mapping[str, Any] | OffloadConfig | None,
        tiers: Sequence[Tier],
    ) -> OffloadManager:
        """Open everything; ``undo`` receives a callback that releases the resources of each
        step."""
        settings = in_process_settings(config, len(tiers))
        registration = register_kv_caches(
            kv_cache_config.num_blocks, group_caches(kv_cache_config, kv_caches, settings)
        )
        memory = make_memory(settings, registration, 1, undo)
        unopened = [UnopenedTier(tier, f"tier {n}") for n, tier in enumerate(tiers)]
        rank = await open_rank(settings, memory, unopened, undo)
        limits = WorkLimits(store_chunks=rank.state.slots, step_chunks=NO_LIMIT)
        layouts = group_layouts(kv_cache_config, settings)
        planner = make_planner(settings, layouts, [rank.state], limits)
        manager = cls(planner, rank.executor, memory.slab, registration)
        rank.executor.start(manager._notice)
        return manager

    async def __aenter__(self) -> OffloadManager:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    # -- use ---------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Return the length of the longest prefix of ``keys`` that the tiers are known to hold.
        ``restore`` also queries shared tiers for keys that this process does not know."""
        self._check_open()
        return self._held(keys, group)

    async def offload(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> int:
        """Copy blocks to the CPU tier and wait for the copy; writes to lower tiers follow in the
        background.

        ``block_ids`` has ``chunk_blocks`` entries per key. Returns how many keys, counted from the
        first one, a tier now holds; there was no space for the rest. The caller can reuse the
        blocks once the call has ended, even if it was cancelled: a call ends only when nothing
        reads its blocks any more. Raises ``ValueError`` before anything is done, and
        ``ManagerClosedError``.
        """
        batch = self._wanted(keys, block_ids, group)
        filling = self.planner.cpu.filling_among(batch.keys)
        end = self.planner.stores.plan(batch, may_wait=True)  # the caller can try again
        own = [self._jobs[store.job] for store in self._pump().stores]
        self._storing = {key: job for key, job in self._storing.items() if not job.done()}
        for job in own:
            fresh = self.planner.cpu.filling_among(batch.keys) - filling
            self._storing |= dict.fromkeys(fresh, job)
        stored = {*own, *(self._storing[key] for key in batch.keys[:end] if key in self._storing)}
        await settled(asyncio.gather(*own, return_exceptions=True))
        if stored:  # including stores of the same keys from other callers' blocks
            await asyncio.wait(stored)
        for job in stored:
            job.result()
        return self._held(keys[:end], group)

    async def restore(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> int:
        """Fill blocks with the longest stored prefix of ``keys``, and wait until they are filled.

        Returns how many chunks, counted from the first one, were restored completely and verified;
        the content of the blocks after them is undefined. The caller can reuse the blocks once the
        call has ended, even if it was cancelled: a call ends only when nothing writes into its
        blocks any more. Raises ``ValueError`` before anything is done, and ``ManagerClosedError``.
        """
        batch = self._wanted(keys, block_ids, group)
        if self.planner.presence.tiers:
            await self._query_shared(batch.keys)
        hit = self._held(keys, group)
        if not hit:
            self._pump()  # a tier whose circuit breaker is open may be due for a probe
            return 0
        self._requests += 1
        request = f"restore-{self._requests}"
        batch = batch.part(0, hit)
        self.planner.loads.plan(request, [batch])
        self.planner.recency.note_everywhere(batch.keys)
        job = next(load.job for load in self._pump().loads if load.request == request)
        result = self._jobs[job]
        ended = self._loads[request] = self._loop.create_future()
        # A read that hangs writes into slots, not blocks, so a cancelled caller does not wait for
        # it.
        if await settled(ended, lambda: self._executor.abandon_load(request)):
            return hit
        self._check_open()
        bad = result.result().bad if result.done() else frozenset()
        if not result.done() or result.result().failed or MISSING_CHUNK.key in bad:
            return 0
        return next((n for n, key in enumerate(batch.keys) if key in bad), hit)

    async def _query_shared(self, keys: Sequence[bytes]) -> None:
        """Query shared tiers for these keys, and wait at most ``lookup_timeout_s``."""
        shared, loop = self.planner.presence, self._loop
        self.planner.tick(loop.time())
        present = present_in(*self.planner.sources.holders())(keys)
        unknown = [key for key, is_there in zip(keys, present, strict=True) if not is_there]
        wait = shared.query(unknown, None, loop.time())
        self._pump()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(shared.limits.lookup_timeout_s):
                while shared.check_wait(wait, loop.time()):
                    self._moved.clear()
                    await self._moved.wait()
        self._check_open()

    async def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything accepted so far has reached, or failed to reach, every tier.

        Raises ``TimeoutError`` if a tier takes longer; work that the tier has already accepted
        continues. Raises ``ManagerClosedError``.
        """
        self._check_open()
        if not await self._ends(self._flushed(), timeout_s):
            raise TimeoutError(f"kvtiers: a tier has not finished its work within {timeout_s:g} s")

    async def reset(self, timeout_s: float = 60.0) -> None:
        """Forget everything at once, in every tier and durably, because the weights have changed.

        Raises ``TierUnavailableError`` if a tier could not make the reset durable within
        ``timeout_s``, and ``ManagerClosedError``.
        """
        self._check_open()
        self._epoch += 1
        shared = self.planner.presence.tiers
        tiers = range(len(self.planner.lower))
        epochs = {n: draw_epoch() if n in shared else self._epoch for n in tiers}
        self.planner.forget_all()
        self.planner.begin_epochs(epochs)
        self._pump()
        is_settled = await self._ends(self._executor.settle(), timeout_s)
        if not is_settled or self._executor.has_pending_epochs:
            raise TierUnavailableError(
                "kvtiers: a tier could not be reset durably. This process no longer finds its "
                "records, but a later process may: delete the tier's folder before you open it "
                "again."
            )

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Flush within ``timeout_s`` seconds, then release tiers, threads and memory.

        New calls raise ``ManagerClosedError`` at once, and calls that are still under way at the
        end raise it too. A cancelled ``aclose`` stops flushing, but releases everything before it
        raises. It may be called several times, also concurrently.
        """
        self._is_closing = True
        flush_s = closes_s = timeout_s
        cancelled: asyncio.CancelledError | None = None
        while not self._released.done():
            if self._closing is None or self._closing.done():
                self._closing = asyncio.ensure_future(self._close(flush_s, closes_s))
            try:
                await asyncio.wait([self._closing])
            except asyncio.CancelledError as error:
                cancelled, flush_s, closes_s = error, 0.0, min(timeout_s, HURRIED_CLOSE_TIMEOUT_S)
                self._closing.cancel()  # close again, with the short limits
        if cancelled is not None:
            raise cancelled

    # -- inside ------------------------------------------------------------------------------

    def _wanted(self, keys: Sequence[bytes], block_ids: Sequence[int], group: int) -> ChunkBatch:
        self._check_open()
        return checked_batch(keys, block_ids, group, self._blocks, self._registration.num_blocks)

    def _check_open(self) -> None:
        if self._is_closing:
            raise ManagerClosedError("kvtiers: this OffloadManager is closed, or being closed")

    def _held(self, keys: Sequence[bytes], group: int) -> int:
        suffix = group_suffix(group)
        gap = present_in(*self.planner.sources.holders())([key + suffix for key in keys]).find(0)
        return gap if gap >= 0 else len(keys)

    def _pump(self) -> StepPlan:
        """Send planned work to the executor."""
        plan = None
        for _ in range(0 if self._is_broken else STEP_ATTEMPTS):
            self.planner.tick(self._loop.time())
            try:
                plan = self.planner.step()
                break
            except Exception as error:
                # this error belongs to an operation that has ended: continue with the others
                self._note_fault(error)
        if plan is None:  # planned jobs are never sent, so callers can reuse their blocks
            self._is_broken = True
            raise InvariantError("kvtiers: nothing can be planned any more; the log says why")
        for job in {*(s.job for s in plan.stores), *(load.job for load in plan.loads)}:
            self._jobs[job] = self._loop.create_future()
        self._executor.post(plan)
        return plan

    def _notice(self) -> None:
        """Schedule ``_take_in`` after an operation has ended.

        This is a callback, not a task: a loop that is about to end cancels all tasks, but a caller
        that waits for a copy must still be notified when it ends.
        """
        if not self._is_due:
            self._is_due = True
            with contextlib.suppress(RuntimeError):
                # the loop is closed, so no caller waits any more
                self._loop.call_soon_threadsafe(self._take_in)

    def _take_in(self) -> None:
        """Pass ended work on to the planner and to the calls that wait for it."""
        self._is_due = False
        drained = self._executor.drain()
        try:
            self.planner.tick(self._loop.time())
            self.planner.complete(drained.report)
        except Exception as error:  # one operation failed; callers of the others need their results
            self._note_fault(error)
        for job, result in drained.report.results.items():
            future = self._jobs.pop(job, None)
            if future is not None and not future.done():
                future.set_result(result)
        for request in drained.finished:
            ended = self._loads.pop(request, None)
            if ended is not None and not ended.done():
                ended.set_result(request not in drained.failed)
        if not self._released.done():
            with contextlib.suppress(
                Exception
            ):  # log the error, and try again when the next operation ends
                self._pump()
        self._moved.set()

    def _note_fault(self, error: Exception) -> None:
        if count := self._faults.add(type(error).__name__):
            what = "kvtiers: the planner has failed %d times like this; its last operation is lost"
            logger.error(what, count, exc_info=error)

    async def _flushed(self) -> None:
        self._pump()
        while self.planner.busy:
            self._moved.clear()
            await self._moved.wait()
        await self._executor.settle()

    async def _ends(self, work: Coroutine[Any, Any, None], timeout_s: float) -> bool:
        """Wait for ``work``; return True if it ends within ``timeout_s``.

        Raises ``ManagerClosedError`` if the manager was closed meanwhile.
        """
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[None]] = {task, self._released}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_over = task.done()
            task.cancel()
        if is_over:
            task.result()
        elif self._released.done():
            self._check_open()
        return is_over

    async def _close(self, flush_s: float, timeout_s: float) -> None:
        """Release everything. If it was cancelled, call it again."""
        try:  # chunks that are not written in time are misses after a restart, nothing worse
            if flush_s:
                await self._ends(self._flushed(), flush_s)
            await self._executor.aclose(timeout_s)
            self._slab.close()
        except Exception as error:  # no call may wait forever because a part does not close
            self._note_fault(error)
        self._released.set_result(None)
        self._take_in()
        waited_for: list[asyncio.Future[Any]] = [*self._jobs.values(), *self._loads.values()]
        for future in waited_for:
            future.set_exception(ManagerClosedError("kvtiers: the OffloadManager was closed"))
            # mark the exception as retrieved: there may be no call that waits for it
            future.exception()
        self._moved.set()

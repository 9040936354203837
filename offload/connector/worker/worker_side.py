"""The connector in a worker process: registers the KV caches, opens the tiers, carries out plans.

Ownership: every method runs on vLLM's model-runner thread; the executor's loop runs on a thread
of its own (`offload.loop`) and is reached by ``post`` and answered by ``drain`` only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offload.config.schema import OffloadConfig, slot_counts
from offload.config.tier_capacity import check_capacity
from offload.connector.worker.cpu_affinity import threads_unbound
from offload.errors import CapacityError, ConfigError, Problem, TierUnavailableError
from offload.layout.keys import GROUP_BYTES, groups_of, joined
from offload.layout.registration import Registration
from offload.loop import EventLoopThread
from offload.messages.plan import StepPlan
from offload.messages.report import RankState, RankTier
from offload.namespaces.manifest import Namespace
from offload.sizes import format_size
from offload.telemetry.counters import WorkerStats
from offload.worker.executor import Executor
from offload.worker.pending import Drained, ExecutorLimits
from offload.worker.tier_factory import TierSpec, make_tier, scrub_limits
from tiers.base import KeyColumn, SharedTier, StoredKeys, Tier, TierError
from tiers.copy.base import CopyEngine, GroupRegions
from tiers.copy.host_engine import HostCopyEngine
from tiers.slab.slab import HostSlab

if TYPE_CHECKING:
    from offload.worker.verify import Verifier

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 3.0
HOOKS_PERIOD_S = 1.0
IDLE_WAIT_S = 0.001
"""An idle engine with work of ours in flight steps without pause; waiting a millisecond for a
result leaves the core to the copies and the disk. A new request waits at most this long."""


class WorkerSide:
    """One rank's slab, copy engine, tiers and executor; ``shares`` of its kind divide the
    configured capacities. ``fence_is_late``: see `offload.connector.startup`."""

    def __init__(
        self,
        config: OffloadConfig,
        rank: int,
        shares: int,
        namespace: Namespace,
        *,
        fence_is_late: bool = False,
    ) -> None:
        self._config = config
        self._rank = rank
        self._shares = shares
        self._namespace = namespace
        self._fence_is_late = fence_is_late
        self._state: RankState | None = None
        self._loop: EventLoopThread | None = None
        self._executor: Executor | None = None
        self._slab: HostSlab | None = None
        self._keep_alive: object = None
        self._verifier: Verifier | None = None
        self._sent: dict[str, float] = {}
        self._hooks_at = time.monotonic()

    # -- start and end -----------------------------------------------------------------------

    def register(self, registration: Registration, device: str, specs: list[TierSpec]) -> None:
        """Take over the registered KV caches: slab, engine, tiers, loop.

        Raises ``ConfigError`` for capacities below one chunk, ``CapacityError`` when the memory
        cannot be had, and ``TierUnavailableError`` for a tier that does not open. Whatever was
        set up by then is let go again.
        """
        with ExitStack() as undo, threads_unbound():
            self._register(registration, device, specs, undo)
            undo.pop_all()

    def _register(
        self, registration: Registration, device: str, specs: list[TierSpec], undo: ExitStack
    ) -> None:
        self._keep_alive = registration.tensors
        self._verifier = self._make_verifier(registration)
        groups = registration.groups
        slot_bytes = max(group.record_bytes for group in groups)
        smallest = min(group.record_bytes for group in groups)
        problems = check_capacity(self._config, slot_bytes, self._shares, smallest)
        if problems:
            raise ConfigError(problems)
        counts = slot_counts(self._config, slot_bytes, self._shares)
        self._slab = self._make_slab(slot_bytes, counts.slots + counts.staging, device)
        undo.callback(self._slab.close)
        engine = _make_engine(groups, self._slab, registration.num_blocks, device)
        undo.callback(engine.close)
        memory = _addresses(self._slab)
        tiers = [make_tier(spec, smallest, memory) for spec in specs]
        self._loop = EventLoopThread()
        undo.callback(self._stop_loop)
        staging = range(counts.staging)  # the first slots: they are pinned first
        limits = ExecutorLimits(
            self._config.load_timeout_s,
            self._config.fence_timeout_s,
            self._config.tier_timeout_s,
        )
        states = self._loop.call(
            self._open(engine, groups, tiers, specs, staging, limits), OPEN_TIMEOUT_S
        )
        self._state = RankState(
            self._rank, self._namespace, counts.staging, counts.slots, slot_bytes, tuple(states)
        )
        logger.info(
            "kvtiers: rank %d: %d slots of %s in the CPU tier%s",
            self._rank,
            counts.slots,
            format_size(slot_bytes),
            "".join(f", {len(s.keys)} records in {s.name}" for s in states),
        )

    def _make_slab(self, slot_bytes: int, slots: int, device: str) -> HostSlab:
        pin = device == "cuda" and self._config.cpu.pin != "off"
        try:
            with ExitStack() as undo:
                slab = HostSlab(
                    slot_bytes,
                    slots,
                    pin=pin,
                    pin_fallback=self._config.cpu.pin == "prefer",
                    numa_node=_gpu_node() if pin else None,
                )
                undo.callback(slab.close)
                if pin:
                    slab.wait_ready(1)  # a memlock limit shows at the first piece
                undo.pop_all()
            return slab
        except Exception as error:  # whatever it was, there is no CPU tier
            raise CapacityError(f"kvtiers: the CPU tier cannot be set up: {error}") from error

    async def _open(
        self,
        engine: CopyEngine,
        groups: tuple[GroupRegions, ...],
        tiers: list[Tier],
        specs: list[TierSpec],
        staging: range,
        limits: ExecutorLimits,
    ) -> list[RankTier]:
        assert self._slab is not None
        states = []
        async with AsyncExitStack() as undo:
            for tier, spec in zip(tiers, specs, strict=True):
                undo.push_async_callback(tier.aclose)
                states.append(await _open_tier(tier, spec, groups))
            undo.pop_all()
        self._executor = Executor(
            self._slab,
            engine,
            groups,
            tiers,
            staging=staging,
            limits=limits,
            rank=self._rank,
            verifier=self._verifier,
            scrubs=scrub_limits(self._config, self._shares),
        )
        for number, (tier, spec) in enumerate(zip(tiers, specs, strict=True)):
            self._executor.stats.opened(number, tier.stats(), spec.set_aside)
        self._executor.start()
        return states

    def _make_verifier(self, registration: Registration) -> Verifier | None:
        if self._config.verify != "device":
            return None
        from offload.worker.device_digest import DeviceDigest
        from offload.worker.verify import Verifier

        folder = Path(self._config.verify_path) if self._config.verify_path else None
        name = f"{self._namespace.name}-rank{self._rank}"
        return Verifier(DeviceDigest(registration), WorkerStats(), folder, name)

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(0.5)

    def state(self) -> RankState | None:
        """What the scheduler side needs; ``None`` before ``register``."""
        return self._state

    def shutdown(self) -> None:
        """Let go of everything within a few seconds. Idempotent."""
        executor, loop, slab = self._executor, self._loop, self._slab
        self._executor = self._loop = self._slab = None
        if loop is None:
            return
        if slab is not None:
            slab.stop_preparing()  # pinning ends while what flies comes down
        closed = executor is None
        if executor is not None:
            try:
                loop.call(executor.aclose(CLOSE_TIMEOUT_S / 2), CLOSE_TIMEOUT_S)
                closed = True
            except Exception as error:  # a hung tier must not hold up the server's end
                logger.warning("kvtiers: the tiers did not close in time: %r", error)
        if loop.stop(0.5) and closed and slab is not None:
            slab.close()  # only when nobody can copy from it any more

    # -- a step ------------------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Before the step's forward pass."""
        try:
            self._fence(plan)
        finally:
            if self._executor is not None:
                self._executor.before_step(plan)

    def _fence(self, plan: StepPlan) -> None:
        """Before anything is overwritten: let the fenced stores finish reading. Where the fence
        comes late they may have read what is there now, and fail unless ``drain`` has seen
        them end, which was before this step began."""
        if plan.fence and self._executor is not None:
            try:
                self._executor.fence(plan.fence)
            except Exception:
                self._executor.poison(plan.fence)
                raise
            if self._fence_is_late:
                self._executor.poison(plan.fence)

    def post(self, plan: StepPlan, *, refused: str = "") -> None:
        """After the step's forward pass was submitted: start the step's jobs. ``refused``: why its
        stores and loads must not be."""
        if self._executor is not None:
            self._executor.post(plan, refused=refused)

    def drain(self, idle: bool) -> Drained:
        """What ended since the last step."""
        if self._executor is None:
            return Drained()
        return self._executor.drain(IDLE_WAIT_S if idle else 0.0)

    def counters(self, hooks: Mapping[str, float]) -> dict[str, float]:
        """What was added to this rank's counters since the last call. ``hooks``, which grow at
        every step, are among them about once a second."""
        if self._executor is None:
            return {}
        now = self._executor.stats.totals()
        if time.monotonic() - self._hooks_at > HOOKS_PERIOD_S:
            self._hooks_at = time.monotonic()
            now |= hooks
        new = {name: value - self._sent.get(name, 0) for name, value in now.items()}
        self._sent |= now
        return {name: value for name, value in new.items() if value}


def _addresses(slab: HostSlab) -> range:
    first = slab.slot_address(0)
    return range(first, first + slab.slot_stride * slab.slot_count)


async def _open_tier(tier: Tier, spec: TierSpec, groups: tuple[GroupRegions, ...]) -> RankTier:
    try:
        info = await tier.open()
    except TierError as error:
        raise TierUnavailableError(f"kvtiers: {spec.where}: {error}") from error
    except ValueError as error:  # its share of what others have left is too small
        fix = "Give more, or remove what else lies below the path (kvtiers clear)."
        raise ConfigError([Problem(f"{spec.where}.capacity", str(error), fix)]) from error
    footprints = {group.group: tier.footprint_bytes(group.record_bytes) for group in groups}
    sizes = {group.group: group.record_bytes for group in groups}
    columns: list[KeyColumn] = []
    if not isinstance(tier, SharedTier):
        batches = tier.keys()
        columns = [_of_groups(batch, sizes) async for batch in batches]
    keys = joined(columns)
    return RankTier(spec.name, info.capacity_bytes, footprints, keys, isinstance(tier, SharedTier))


def _of_groups(found: StoredKeys, sizes: Mapping[int, int]) -> KeyColumn:
    """The keys of records that belong to a group and are as long as its chunks."""
    if found.column.itemsize <= GROUP_BYTES:
        return found.column[:0]
    groups = groups_of(found.column)
    fits = np.zeros(groups.size, np.bool_)
    for group, size in sizes.items():
        fits |= (groups == group) & (found.payload_bytes == size)
    return found.column if fits.all() else found.column[fits]


def _gpu_node() -> int | None:
    from tiers.copy.cuda_engine import gpu_node

    return gpu_node()


def _make_engine(
    groups: tuple[GroupRegions, ...], slab: HostSlab, num_blocks: int, device: str
) -> CopyEngine:
    if device == "cuda":
        from tiers.copy.cuda_engine import CudaCopyEngine

        return CudaCopyEngine(groups, slab, num_blocks=num_blocks)
    return HostCopyEngine(groups, slab, num_blocks=num_blocks)

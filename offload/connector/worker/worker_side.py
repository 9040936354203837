"""The connector in a worker process: registers the KV caches, opens the tiers, carries out plans.

Ownership: every method runs on vLLM's model-runner thread. The executor's loop runs on a separate
thread (`offload.loop`); ``post`` is the only way to send it work, and ``drain`` the only way to get
results.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from offload.config.schema import OffloadConfig
from offload.connector.worker.cpu_affinity import threads_unbound
from offload.errors import TierUnavailableError
from offload.layout.registration import Registration
from offload.loop import EventLoopThread
from offload.messages.plan import StepPlan
from offload.messages.report import RankState
from offload.namespaces.manifest import Namespace
from offload.sizes import rounded_size
from offload.telemetry.counters import WorkerStats
from offload.worker.executor import Executor
from offload.worker.rank_memory import RankMemory, make_memory
from offload.worker.runtime import UnopenedTier, open_rank
from offload.worker.tier_factory import TierSpec, make_tier
from offload.worker.unanswered_jobs import Drained
from policies.safe_text import safe_repr
from tiers.slab.slab import HostSlab

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

logger = logging.getLogger(__name__)

OPEN_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
OPEN_TIMEOUT_S = "600"
"""Our limit is that of vLLM for an engine's start: its environment variable and default, in
seconds."""
OPEN_WARNING_S = 30.0
RANK_CLOSE_TIMEOUT_S = 3.0
SLEEP_TIMEOUT_S = 30.0
"""Maximum time that ``fall_asleep`` waits for copies in progress. A copy takes milliseconds."""
HOOKS_PERIOD_S = 1.0
IDLE_WAIT_S = 0.001
"""While an idle engine has work in flight, it steps without pause. Waiting a millisecond per step
for a result leaves the core free for copies and the disk, and delays a new request by at most this
time."""


class WorkerSide:
    """One rank's slab, copy engine, tiers and executor.

    The configured capacities are divided among ``shares`` workers. ``fence_is_late``: see
    `offload.connector.startup`.
    """

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

    def register(self, registration: Registration, specs: Sequence[TierSpec]) -> None:
        """Take over the registered KV caches: slab, engine, tiers, loop.

        Raises ``ConfigError`` for capacities below one chunk, ``CapacityError`` when the memory is
        not available, and ``TierUnavailableError`` for a tier that does not open. On an error it
        releases everything that it has set up.
        """
        with ExitStack() as undo, threads_unbound():
            self._register(registration, specs, undo)
            undo.pop_all()

    def _register(
        self, registration: Registration, specs: Sequence[TierSpec], undo: ExitStack
    ) -> None:
        self._keep_alive = registration.tensors
        self._verifier = self._make_verifier(registration)
        memory = make_memory(self._config, registration, self._shares, undo)
        self._slab = memory.slab
        tiers = [self._make_tier(spec, memory) for spec in specs]
        self._loop = EventLoopThread()
        undo.callback(self._stop_loop)
        opening = Opening([spec.description for spec in specs])
        self._state = state = opening.wait_for(
            self._loop.start(self._open(memory, tiers, opening.begin))
        )
        logger.info(
            "kvtiers: rank %d: %d slots of %s in the CPU tier%s",
            self._rank,
            state.slots,
            rounded_size(state.slot_bytes),
            "".join(f", {sum(map(len, t.keys))} records in {t.name}" for t in state.tiers),
        )

    @staticmethod
    def _make_tier(spec: TierSpec, memory: RankMemory) -> UnopenedTier:
        tier = make_tier(spec, memory.record_bytes, memory.addresses)
        return UnopenedTier(tier, spec.where, spec.name, f"{spec.where}.capacity", spec.set_aside)

    async def _open(
        self,
        memory: RankMemory,
        tiers: Sequence[UnopenedTier],
        on_opening: Callable[[int], object],
    ) -> RankState:
        async with AsyncExitStack() as undo:
            rank = await open_rank(
                self._config,
                memory,
                tiers,
                undo,
                rank=self._rank,
                shares=self._shares,
                namespace=self._namespace,
                verifier=self._verifier,
                on_opening=on_opening,
            )
            undo.pop_all()
        self._executor = rank.executor
        rank.executor.start()
        return rank.state

    def _make_verifier(self, registration: Registration) -> Verifier | None:
        if self._config.verify != "device":
            return None
        from offload.worker.block_verifier import Verifier
        from offload.worker.device_digest import DeviceDigest

        folder = Path(self._config.verify_path) if self._config.verify_path else None
        name = f"{self._namespace.name}-rank{self._rank}"
        return Verifier(DeviceDigest(registration), WorkerStats(), folder, name)

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(0.5)

    def wait_until_pinned(self, timeout_s: float) -> bool:
        """Wait until the whole CPU tier can be used; returns False on timeout."""
        return self._slab is None or self._slab.wait_ready(timeout_s=timeout_s)

    def state(self) -> RankState | None:
        """The facts that the scheduler side needs, or ``None`` before ``register``."""
        return self._state

    def shutdown(self) -> None:
        """Release everything within a few seconds. Idempotent."""
        executor, loop, slab = self._executor, self._loop, self._slab
        self._executor = self._loop = self._slab = None
        if loop is None:
            return
        if slab is not None:
            slab.stop_preparing()  # unpinning runs while operations in flight end
        closed = executor is None
        if executor is not None:
            try:
                loop.call(executor.aclose(RANK_CLOSE_TIMEOUT_S / 2), RANK_CLOSE_TIMEOUT_S)
                closed = True
            except Exception as error:  # a tier that hangs must not delay the shutdown
                logger.warning("kvtiers: the tiers did not close in time: %s", safe_repr(error))
        if loop.stop(0.5) and closed and slab is not None:
            slab.close()  # only when nothing can copy from the slab any more

    # -- a step ------------------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Call before the step's forward pass."""
        try:
            self._fence(plan)
        finally:
            if self._executor is not None:
                self._executor.before_step(plan)

    def _fence(self, plan: StepPlan) -> None:
        """Let the fenced stores finish reading before anything is overwritten.

        If the fence comes too late, these stores may have read the new content. They then fail,
        unless ``drain`` reported them as finished before this step began.
        """
        if plan.fence and self._executor is not None:
            try:
                self._executor.fence(plan.fence)
            except Exception:  # whatever failed, the stores under way are not trusted
                self._executor.poison(plan.fence)
                raise
            if self._fence_is_late:
                self._executor.poison(plan.fence)

    def post(self, plan: StepPlan, *, refused: str = "") -> None:
        """Start the step's jobs, after its forward pass was submitted.

        ``refused``: the reason why the plan's stores and loads must fail, or an empty string.
        """
        if self._executor is not None:
            self._executor.post(plan, refused=refused)

    def fall_asleep(self) -> bool:
        """Keep every copy away from the KV cache from now on, because vLLM is about to unmap it.
        Returns whether this side was awake. Raises ``TransferError`` if a copy does not end."""
        if self._executor is None or self._executor.copy_pause.reason:
            return False
        self._executor.copy_pause.begin(SLEEP_TIMEOUT_S)
        return True

    def wake_up(self) -> None:
        """Resume copies: the KV cache is mapped again, at its old addresses."""
        if self._executor is not None:
            self._executor.copy_pause.end()

    def drain(self, idle: bool) -> Drained:
        """Return the results of everything that has finished since the previous step."""
        if self._executor is None:
            return Drained()
        return self._executor.drain(IDLE_WAIT_S if idle else 0.0)

    def counters(self, hooks: Mapping[str, float]) -> dict[str, float]:
        """Return how much this rank's counters have grown since the previous call.

        About once a second this includes ``hooks``, whose counters grow at every step.
        """
        if self._executor is None:
            return {}
        now = self._executor.stats.totals()
        if time.monotonic() - self._hooks_at > HOOKS_PERIOD_S:
            self._hooks_at = time.monotonic()
            now |= hooks
        new = {name: value - self._sent.get(name, 0) for name, value in now.items()}
        self._sent |= now
        return {name: value for name, value in new.items() if value}


class Opening:
    """The opening of a rank's tiers, one after another. Names the one that takes long.

    Opening takes seconds per million records, and longer on a slow disk; a disk that hangs never
    answers. ``begin`` is called on the loop's thread, ``wait_for`` on another one.
    """

    def __init__(self, tiers: Sequence[str]) -> None:
        """``tiers`` describes each tier for messages."""
        self._tiers = tiers
        self._current = "the tiers"

    def begin(self, number: int) -> None:
        """Record that this tier is opened from now on."""
        self._current = self._tiers[number]

    def wait_for(self, state: Future[RankState]) -> RankState:
        """Wait until all tiers are open. Raises ``TierUnavailableError`` if that takes too long."""
        limit_s = float(os.environ.get(OPEN_TIMEOUT, OPEN_TIMEOUT_S))
        end = time.monotonic() + limit_s
        while not wait([state], min(OPEN_WARNING_S, max(0.0, end - time.monotonic()))).done:
            if time.monotonic() >= end:
                state.cancel()
                raise TierUnavailableError(
                    f"kvtiers: the tiers did not open within {limit_s:g} s: {self._current} is "
                    "still opening. If the disk works, it needs more time: increase "
                    f"{OPEN_TIMEOUT}, or remove the records (kvtiers clear)"
                )
            text = "kvtiers: still opening %s; waiting for at most %g s (%s)"
            logger.warning(text, self._current, limit_s, OPEN_TIMEOUT)
        return state.result()

"""``KvTiersConnector``: passes each of vLLM's hooks on to the scheduler side or the worker side.

vLLM makes one object in the scheduler's process and one in each worker. Hooks of the other side,
and those of the scheduler side before all workers are ready, do nothing.

Every hook that vLLM calls while it serves is guarded: an exception becomes a miss. Hooks that run
once at start-up may raise: a clear error at start is better than a fault while serving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from offload.config.schema import draft_config
from offload.connector.compat import follow_sleep
from offload.connector.guard import Faults, guarded, run_all
from offload.connector.log import adopt_vllm_logging
from offload.connector.metadata import (
    OffloadHandshake,
    OffloadMetadata,
    OffloadWorkerMetadata,
    WeightsAnswer,
)
from offload.connector.model.adapters import AdapterWatch
from offload.connector.model.loaded_weights import LoadedWeights
from offload.connector.scheduler.gpu_cache import GpuCache
from offload.connector.scheduler.prometheus import OffloadPromMetrics, OffloadStats
from offload.connector.serving import Serving, begin_serving
from offload.connector.startup import ServerSetup
from offload.connector.worker.weights_watch import WeightsWatch
from offload.connector.worker.worker_side import WorkerSide
from offload.errors import OffloadError
from offload.messages.plan import StepPlan
from offload.messages.report import RankState

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KvTiersConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is untyped here
    """Offloads KV blocks to a CPU tier and lower tiers, and restores them.

    ``serving`` is ``None`` in a worker, and until all workers are ready.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        self.faults = Faults()
        is_worker = role == KVConnectorRole.WORKER
        first_worker = is_worker and vllm_config.parallel_config.rank == 0
        try:
            self._setup = ServerSetup.of(
                vllm_config, kv_cache_config, is_worker=is_worker, first_worker=first_worker
            )
        except OffloadError as error:
            # Log it here as well: vLLM buries it in the tracebacks of several processes.
            logger.error("%s", error)
            raise
        self.serving: Serving | None = None
        self._gpu_cache = GpuCache()
        self._worker: WorkerSide | None = None
        self._adapter_watch: AdapterWatch | None = None
        self._weights_watch: WeightsWatch | None = None
        self._drained_meta: OffloadWorkerMetadata | None = None
        if is_worker:
            self._prepare_worker(vllm_config)
        else:
            self._setup.recompute_failed_loads()
            self._setup.announce()

    def _prepare_worker(self, vllm_config: VllmConfig) -> None:
        self._worker = WorkerSide(
            self._setup.config,
            self._setup.rank,
            self._setup.shares,
            self._setup.namespace,
            fence_is_late=self._setup.fence_is_late,
        )
        if self._setup.can_sleep:
            layers = vllm_config.compilation_config.static_forward_context
            self._weights_watch = WeightsWatch(LoadedWeights(layers).digest)
            follow_sleep()
        if vllm_config.lora_config is not None:
            self._adapter_watch = AdapterWatch(vllm_config.lora_config)
            self._adapter_watch.begin()

    # -- class methods that vLLM calls -----------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: this is a cache, so a dropped store only causes a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: the connector does no work per layer, so full CUDA graphs are possible.

        It also checks the configuration, because vLLM calls this method early, while parsing flags.
        """
        ServerSetup.check(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """``BLHNC`` if the user asks for it, so that one copy moves a block.

        It is not the default, because with this layout vLLM cannot split blocks for kernels that
        need small ones, and fails at start. This method is called before the kernels are known
        (docs/decisions/0024).

        A faulty configuration is ignored here: the full check that follows reports every problem.
        """
        config, _ = draft_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return "BLHNC" if config.kv_layout == "block_contiguous" else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data=data) if data is not None else OffloadStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            registration = self._setup.register(kv_caches)
            self._worker.register(registration, self._setup.tier_specs())
            if self._weights_watch is not None:
                self._weights_watch.begin()

    def wait_until_pinned(self, timeout_s: float) -> bool:
        """Wait until this worker can use its whole CPU tier, which is pinned in the background.
        Returns False on timeout. For benchmarks: servers need not wait."""
        return self._worker is None or self._worker.wait_until_pinned(timeout_s)

    def unregister_kv_caches(self) -> None:
        """Prepare for vLLM unmapping the KV cache. Raises if a copy does not end: vLLM then refuses
        to sleep, instead of unmapping memory that the copy still uses."""
        fell_asleep = self._worker is not None and self._worker.fall_asleep()
        if fell_asleep and self._weights_watch is not None:
            self._weights_watch.fell_asleep()

    @guarded(lambda: None)
    def restore_kv_caches(self) -> None:
        """Resume after vLLM has mapped the KV cache again, without its content."""
        if self._worker is not None:
            self._worker.wake_up()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        state = self._worker.state() if self._worker is not None else None
        return OffloadHandshake(state) if state is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._fence(_plan_of(kv_connector_metadata))

    @guarded(lambda: None)
    def _fence(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.before_step(plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: loads are asynchronous and are posted with all other jobs after the forward
        pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no load is done layer by layer."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: no store is done layer by layer."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.post(_plan_of(self._connector_metadata), refused=self._refusal_reason())

    def _refusal_reason(self) -> str:
        """Return the reason why none of the plan's copies may run, or an empty string."""
        meta = self._connector_metadata
        if not isinstance(meta, OffloadMetadata) or not meta.adapters:
            return ""
        if self._adapter_watch is not None and self._adapter_watch.agrees(meta.adapters):
            return ""
        return "a LoRA adapter was loaded again with other content"

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._drained_meta = None
        return self._drain()

    @guarded(KVConnectorTransferResults)
    def _drain(self) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        drained = self._worker.drain(_plan_of(self._connector_metadata).idle)
        try:
            counters = self._worker.counters(self.faults.times())
            adapters = self._adapter_watch.take() if self._adapter_watch is not None else {}
            weights = self._weights_answer()
        except Exception as error:  # the results of jobs must still be sent
            self.faults.note("drain", error)
            counters, adapters, weights = {}, {}, None
        if not drained.report.empty or counters or adapters or weights:
            self._drained_meta = OffloadWorkerMetadata(drained.report, counters, adapters, weights)
        return KVConnectorTransferResults(
            finished_recving=drained.finished, failed_recving=drained.failed
        )

    def _weights_answer(self) -> WeightsAnswer | None:
        """Answer this step's question about the weights, if there is one."""
        meta = self._connector_metadata
        question = meta.question if isinstance(meta, OffloadMetadata) else 0
        return self._weights_watch.answer(question) if self._weights_watch is not None else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        meta, self._drained_meta = self._drained_meta, None
        return meta

    # -- scheduler side ------------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        # vLLM registers the same caches again whenever it wakes up.
        if self._worker is None and self.serving is None:
            ranks = [_state_of(meta) for _, meta in sorted(metadata.items())]
            self.serving = begin_serving(self._setup, ranks, self._gpu_cache, self.faults)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._gpu_cache = self._gpu_cache.with_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        # The base class calls this, too, with the pool of ``bind_kv_cache_manager``.
        self._gpu_cache = self._gpu_cache.with_pool(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self.serving is not None:
            self.serving.side.admit(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.serving is None:
            return 0, False
        tokens = self.serving.side.lookup(request, num_computed_tokens)
        return tokens, bool(tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.serving is not None:
            self.serving.side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self.serving is None or num_external_tokens == 0:
            return {}
        host, disk = self.serving.side.hit_sources(request, num_external_tokens)
        counts = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in counts.items() if tokens}

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Return False: no blocks become free instead. vLLM asks before each preemption."""
        if self.serving is not None:
            self.serving.side.before_preemption()
        return False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = self._build_plan(scheduler_output)
        if self.serving is None:
            return OffloadMetadata(plan)
        computes = scheduler_output.total_num_scheduled_tokens > 0
        question = self.serving.resets.question if computes else 0
        return OffloadMetadata(plan, self.serving.side.requests.adapters.assumed, question)

    @guarded(StepPlan)
    def _build_plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        if self.serving is None:
            return StepPlan()
        try:  # before anything that can fail
            side = self.serving.side
            preempted = partial(side.uncomputed.remove, scheduler_output.preempted_req_ids or ())
            run_all([preempted, side.old_kv.step])
        except Exception as error:  # the step's plan must still be sent
            self.faults.note("build_connector_meta", error)
        try:
            self.serving.resets.before_step()
        except Exception as error:  # as above
            self.faults.note("build_connector_meta", error)
        try:
            return self.serving.side.build_plan(scheduler_output)
        except Exception:  # the fences of this step are lost
            self.serving.side.planner.stores.distrust()
            raise

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.serving is None:
            return
        side, ours = self.serving.side, _ours(connector_output.kv_connector_worker_meta)
        try:
            self._note_changes(self.serving, ours, connector_output)
        finally:
            try:
                side.update(
                    ours.report if ours is not None else None,
                    connector_output.finished_recving or (),
                    connector_output.failed_recving or (),
                )
            finally:
                if ours is not None:
                    self.serving.metrics.add_worker_counters(ours.counters)

    @staticmethod
    def _note_changes(
        serving: Serving, ours: OffloadWorkerMetadata | None, output: KVConnectorOutput
    ) -> None:
        """Record what decides whether stored chunks can be trusted. This must precede the planner's
        commit of anything that was stored in the meantime. Each part is recorded even if another
        fails: the workers do not send it again."""
        changes: list[Callable[[], None]] = []
        if ours is not None and ours.adapters:
            changes.append(partial(serving.side.adapters_loaded, ours.adapters))
        if ours is not None and ours.weights is not None:
            changes.append(partial(serving.resets.answered, ours.weights))
        if output.invalid_block_ids:  # of another connector in a MultiConnector
            changes.append(serving.side.load_failed_elsewhere)
        try:
            run_all(changes)
        except Exception:  # what was not noted may concern what is being stored
            serving.side.planner.stores.distrust()
            raise

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, block_ids)

    def _finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the request's missing chunks; vLLM may free its blocks at once.

        If vLLM reuses the blocks while stores still read them, a fence makes vLLM wait for those
        stores. The returned dictionary goes into the answer's ``kv_transfer_params``; vLLM acts
        only on the names of other connectors in it.
        """
        if self.serving is None:
            return False, None
        try:
            self.serving.side.old_kv.ended(request.request_id)
        except Exception as error:  # the request ends all the same
            self.faults.note("request_finished", error)
        return False, self.serving.side.finished(request, block_ids)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self.serving is not None and self.serving.side.pending

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._stats()

    @guarded(lambda: None)
    def _stats(self) -> OffloadStats | None:
        if self.serving is None:
            return None
        events = self.serving.events
        lost = events.lost if events is not None else 0
        return self.serving.metrics.collect({"events_lost": lost})

    @guarded(lambda: ())
    def take_events(self) -> Iterable[Any]:
        events = self.serving.events if self.serving is not None else None
        return events.take() if events is not None else ()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Invalidate every tier before this returns, because the weights may have changed.

        Returns ``False`` if the disk of a tier did not answer in time. A server that starts after
        this one was killed might then find old blocks in that tier. The tier is not used until its
        disk has recorded the change; call this again to find out whether it has.
        """
        return self.serving.resets.reset() if self.serving is not None else None

    # -- both sides ----------------------------------------------------------------------------

    @guarded(lambda: None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self.serving is not None:
            self.serving.side.close()
            self.serving.resets.epochs.close()


def _plan_of(metadata: KVConnectorMetadata | None) -> StepPlan:
    """The plan in a step's metadata, or an empty plan if there is none (profiling runs)."""
    return metadata.plan if isinstance(metadata, OffloadMetadata) else StepPlan()


def _ours(meta: object) -> OffloadWorkerMetadata | None:
    """Return the workers' metadata unless it is of another connector."""
    return meta if isinstance(meta, OffloadWorkerMetadata) else None


def _state_of(metadata: KVConnectorHandshakeMetadata) -> RankState:
    if not isinstance(metadata, OffloadHandshake):
        raise OffloadError(
            "kvtiers: vLLM's MultiConnector passes the start-up data of one connector to all of "
            f"them, here {type(metadata).__name__}. kvtiers cannot run beside that connector"
        )
    return metadata.state


OffloadConnector = KvTiersConnector
"""The connector's earlier name."""

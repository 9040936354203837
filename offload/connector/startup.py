"""Derives, at start-up, everything that one process of a server needs from vLLM's configuration.

The scheduler and the workers do this independently and must get the same result; the handshake
compares the results.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.config.machine_checks import load_config, patiently, same_server
from offload.config.schema import OffloadConfig, parse_config
from offload.connector.contract.at_start import check_installed
from offload.connector.model.identity import geometry_fields, hash_fields, namespace_fields
from offload.connector.model.layout import model_layout, page_regions
from offload.connector.model.worker_geometry import describe, kernel_of
from offload.connector.scheduler.wrong_kv import WrongKvCauses
from offload.connector.startup_checks import (
    check_vllm_config,
    recompute_failed_loads,
    startup_warnings,
)
from offload.errors import ConfigError, NamespaceError
from offload.index.tier_index import TierIndex
from offload.layout.groups import ModelLayout, recorded_group
from offload.layout.registration import LayerTensors, Registration, as_list
from offload.messages.report import RankState
from offload.namespaces.cleanup import describe_nearest_namespace
from offload.namespaces.epochs import TierEpochs
from offload.namespaces.geometry import Geometry
from offload.namespaces.manifest import Namespace, differing_fields
from offload.namespaces.wait_for_owners import Patience
from offload.requests.request_file import RequestFile
from offload.requests.request_log import RequestLog, Sink
from offload.requests.trace_recorder import TraceRecorder
from offload.worker.tier_factory import TierSpec
from offload.worker.tier_folders import TierFolders

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass
class ServerSetup:
    """Configuration, geometry and identity of one server, as seen from one process.

    In a worker, ``namespace`` is complete; a scheduler knows part of it until it has adopted the
    workers' namespace. Capacities are divided among ``shares`` workers of this machine: all ranks
    of all data-parallel replicas.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    config: OffloadConfig
    layout: ModelLayout
    namespace: Namespace
    rank: int
    shares: int
    replica: int
    _records: bytes = b""
    _geometry: Geometry | None = None

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        is_worker: bool,
        first_worker: bool,
    ) -> ServerSetup:
        """Derive everything from vLLM's configuration. The first worker also checks the
        configuration against the machine, before it claims memory or folders.

        Raises ``ConfigError`` and ``LayoutError``.
        """
        parallel = vllm_config.parallel_config
        problems = check_vllm_config(vllm_config)
        if problems:
            raise ConfigError(problems, "--kv-transfer-config")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = cls.check(extra) if first_worker else parse_config(extra)
        layout = model_layout(kv_cache_config, vllm_config, config.chunk_blocks)
        fields = (
            namespace_fields(vllm_config, kv_cache_config, config.chunk_blocks)
            if is_worker
            else {
                "hash": hash_fields(vllm_config),
                "geometry": geometry_fields(vllm_config, kv_cache_config, config.chunk_blocks),
            }
        )
        return cls(
            vllm_config,
            kv_cache_config,
            config,
            layout,
            Namespace.of(fields),
            parallel.rank,
            parallel.world_size * max(1, parallel.data_parallel_size_local),
            parallel.data_parallel_index,
        )

    def adopt(self, namespace: Namespace) -> None:
        """Adopt the namespace that the workers have agreed on."""
        self.namespace = namespace

    @property
    def fence_is_late(self) -> bool:
        """True if vLLM overwrites blocks before it calls ``handle_preemptions``.

        Before that hook, Model Runner V2 (which vLLM chooses wherever Triton works) zeroes fresh
        blocks and copies recurrent states (``update_requests``, ``preprocess_state``); Model Runner
        V1 does so after the hook. The result is true only for models whose blocks need zeroing,
        among them all models with recurrent states.
        """
        runner, cache = self.vllm_config, self.kv_cache_config
        return bool(runner.use_v2_model_runner and cache.needs_kv_cache_zeroing)

    @property
    def can_sleep(self) -> bool:
        """True if vLLM may unmap the weights and the KV cache (sleep mode)."""
        return bool(self.vllm_config.model_config.enable_sleep_mode)

    @property
    def runs_by_priority(self) -> bool:
        """True if vLLM runs requests in the order of their priorities."""
        return bool(self.vllm_config.scheduler_config.policy == "priority")

    @property
    def wrong_kv_causes(self) -> WrongKvCauses:
        """Why vLLM may continue requests from wrong KV."""
        return WrongKvCauses.of(self.vllm_config, self.layout)

    @property
    def publishes_events(self) -> bool:
        """True if vLLM publishes KV events."""
        events = self.vllm_config.kv_events_config
        return bool(events is not None and events.enable_kv_cache_events)

    @staticmethod
    def check(extra_config: Mapping[str, Any]) -> OffloadConfig:
        """Read the configuration and check it against this machine; log what was chosen.

        Other ranks of this server may already have claimed their folders. Raises ``ConfigError``
        with every problem.
        """
        loaded = patiently(
            lambda: load_config(extra_config, same_server),
            Patience(lambda line: logger.warning("kvtiers: %s", line)),
        )
        for line in loaded.notes:
            logger.info("kvtiers: %s", line)
        for warning in loaded.warnings:
            logger.warning("kvtiers: %s", warning)
        return loaded.config

    def recompute_failed_loads(self) -> None:
        """Let vLLM recompute requests whose load fails; by default it ends them with an error."""
        if recompute_failed_loads(self.vllm_config):
            logger.info(
                "kvtiers: kv_load_failure_policy was 'fail' (vLLM's default) and is now "
                "'recompute': if a load fails, vLLM computes the request instead of ending it"
            )

    def announce(self) -> None:
        """Log the chosen settings and what a user should know about them."""
        if untested := check_installed():
            logger.warning("kvtiers: %s", untested)
        for line in startup_warnings(self.vllm_config, self.config):
            logger.warning("kvtiers: %s", line)
        cache = self.vllm_config.cache_config
        if cache.user_specified_block_size:
            # For hybrid models, vLLM has replaced the given block size by its own.
            used = sorted({group.block_tokens for group in self.layout.groups})
            text = "kvtiers: vLLM uses blocks of %s tokens instead of the given --block-size"
            logger.info(text, " and ".join(map(str, used)))
        for group in self.layout.groups:
            if group.chunk_blocks < self.config.chunk_blocks:
                text = (
                    "kvtiers: group %d (%s) gets chunks of %d blocks: with %d, hits would be lost"
                )
                wanted = self.config.chunk_blocks
                logger.info(text, group.group, group.kind, group.chunk_blocks, wanted)
        for skipped in self.layout.skipped:
            logger.info("kvtiers: not offloaded: %s", skipped)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> Registration:
        """The addresses of this worker's KV caches."""
        registration = page_regions(self.layout, self.kv_cache_config, kv_caches)
        form = _form_of(self.kv_cache_config.num_blocks, kv_caches, self._kernels(kv_caches))
        self._records = hashlib.blake2b(self.namespace.digest + form, digest_size=16).digest()
        self._geometry = self._describe_geometry(kv_caches, registration)
        return registration

    def _kernels(self, kv_caches: Mapping[str, LayerTensors]) -> dict[str, str]:
        """The kernels of the layers, by name."""
        layers = self.vllm_config.compilation_config.static_forward_context
        found = {}
        for name in kv_caches:
            try:
                found[name] = kernel_of(layers.get(name))
            except Exception:  # an unknown kind of layer; its shape is still included
                found[name] = ""
        return found

    def _describe_geometry(
        self, kv_caches: Mapping[str, LayerTensors], registration: Registration
    ) -> Geometry | None:
        """Describe this worker's records for engines with another geometry.

        Returns ``None`` if that is not possible; the server then starts unless the user has
        requested translation.
        """
        try:
            geometry = describe(
                self.vllm_config,
                self.kv_cache_config,
                self.layout,
                kv_caches,
                registration,
                self._records,
            )
            geometry.dump()  # engines with another user id must be able to read it
        except Exception as error:  # an unknown kind of model
            if any(tier.geometry != "own" for tier in self.config.tiers):
                raise
            text = (
                "kvtiers: engines with another geometry will not be able to read these blocks: %r"
            )
            logger.warning(text, error)
            return None
        return geometry

    def tier_specs(self) -> list[TierSpec]:
        """Open this rank's lower tiers and claim their folders for this process. Call it after
        ``register``.

        Raises ``NamespaceError`` if there are stored blocks of another geometry that must not be
        read.
        """
        return TierFolders(
            self.config,
            self.namespace,
            self._records,
            self.rank,
            self.replica,
            self.shares,
            engine=f"{self.vllm_config.model_config.model}",
            geometry=self._geometry,
            ranks=self.vllm_config.parallel_config.world_size,
        ).specs()

    def tier_epochs(self) -> TierEpochs:
        """Returns the object that begins epochs of the lower tiers, which the workers have opened
        by now."""
        paths = [tier.path for tier in self.config.tiers]
        shared = [number for number, tier in enumerate(self.config.tiers) if tier.shared]
        return TierEpochs(paths, self.namespace, self.replica, shared)

    def recorder(self) -> TraceRecorder | None:
        """The recorder of this server's prompts, if one is configured."""
        path = self.config.record_trace
        if path is None:
            return None
        return TraceRecorder(self._replica_path(path), recorded_group(self.layout).chunk_tokens)

    def request_log(self) -> RequestLog:
        """The log of this server's lookups, which also writes a file and sends spans if that is
        configured. Call it after ``adopt``."""
        sinks: list[Sink] = []
        records_max, path = self.config.recent_requests, self.config.record_requests
        if path is not None:
            sinks.append(RequestFile(self._replica_path(path), records_max, self.namespace.name))
        if self.vllm_config.observability_config.otlp_traces_endpoint:
            from offload.connector.scheduler.request_spans import RequestSpans

            sinks.append(RequestSpans(self.layout.hash_tokens))
        return RequestLog(records_max, *sinks)

    def _replica_path(self, path: str) -> str:
        """A path for this data-parallel replica alone."""
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            return path
        stem, dot, rest = path.rpartition(".jsonl")
        return f"{stem or rest}.{self.replica}{dot}{rest if stem else ''}"

    def namespace_differences(self, lower: Sequence[TierIndex]) -> list[str]:
        """The fields in which the records of other namespaces differ from this one, for tiers
        without records of this namespace."""
        empty = [
            tier for tier, index in zip(self.config.tiers, lower, strict=False) if not len(index)
        ]
        folders = [tier.path for tier in empty if tier.path]
        return [
            line for path in folders for line in describe_nearest_namespace(path, self.namespace)
        ]


def agreed_namespace(own: Namespace, ranks: Sequence[RankState]) -> Namespace:
    """The namespace in which the workers store.

    ``own`` contains the fields that the scheduler determines, because it makes the keys and the
    layout. Raises ``NamespaceError``, naming the fields, if two processes disagree.
    """
    first = ranks[0]
    for other in ranks[1:]:
        _check_equal(other.namespace, f"rank {other.rank}", first.namespace, f"rank {first.rank}")
    stored = first.namespace.fields
    theirs = Namespace.of({name: stored.get(name) for name in own.fields})
    _check_equal(theirs, f"rank {first.rank}", own, "the scheduler")
    return first.namespace


def _check_equal(one: Namespace, name: str, other: Namespace, other_name: str) -> None:
    found = [f"{path} ({a} and {b})" for path, a, b in differing_fields(one, other)]
    if found:
        raise NamespaceError(
            f"kvtiers: {name} and {other_name} differ in {', '.join(found[:8])}. All processes "
            "of a server must see the same model files, flags, environment and versions."
        )


def _form_of(
    num_blocks: int, kv_caches: Mapping[str, LayerTensors], kernels: Mapping[str, str]
) -> bytes:
    """Describe in which order the kernels of this worker arrange the bytes inside a page.

    By layer: the kernel's name, kernel blocks per block, shape and dtype. At the next start vLLM
    may choose other kernels with pages of equal size and shape, depending on installed packages and
    the environment. Records of such kernels have another byte order, so they must not match.
    """
    forms = [
        f"{name} {kernels[name]} {tensor.shape[0] / num_blocks} {tuple(tensor.shape[1:])} "
        f"{tensor.dtype}"
        for name, tensors in sorted(kv_caches.items())
        for tensor in as_list(tensors)
    ]
    return "\n".join(forms).encode()

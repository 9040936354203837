"""kvtiers' LMDB tier below vLLM's own CPU tier, for servers that use vLLM's tiering.

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{
            "type": "LmdbSecondaryTier",
            "module_path": "offload.connector.secondary_tier",
            "path": "/var/cache/kv",
            "capacity": "100GiB"
        }]
    }

vLLM calls the tier on its scheduler's thread; every operation that waits runs on a separate event
loop. The tier evicts, verifies and recovers as under kvtiers' connector. Everything above the tier
is vLLM's: vLLM looks up one key at a time, and a prefix must fit into its CPU tier.

Ownership: vLLM's thread owns ``_open``; the loop owns the tier; finished jobs return through a
queue.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import queue
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from offload.config.path_checks import location_problem
from offload.connector.model.identity import content_of
from offload.connector.model.process_config import configs_of
from offload.errors import TierUnavailableError
from offload.loop import EventLoopThread
from offload.namespaces.wait_for_owners import Patience
from offload.sizes import parse_size
from policies.base import EntryInfo, RemoveCause
from policies.guarded import contained
from policies.registry import make_policy
from tiers.adapters.evicting import EvictingTier
from tiers.base import Buffer, ReadOutcome, TierError, WriteOutcome
from tiers.folders.folder import FolderInUseError
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.tier import LmdbTier
from tiers.record import NAMESPACE_BYTES

logger = logging.getLogger(__name__)

SECONDARY_OPEN_TIMEOUT_S = 300.0
SECONDARY_CLOSE_TIMEOUT_S = 60.0
RESET_TIMEOUT_S = 30.0
DRAIN_WARNING_S = 5.0


class LmdbSecondaryTier(SecondaryTierManager):  # type: ignore[misc]  # vllm is untyped here
    """A ``secondary_tiers`` entry of vLLM's ``TieringOffloadingSpec``.

    ``capacity`` is a size such as ``"100GiB"``; ``policy`` names an eviction policy. Models and
    geometries that vLLM's file tier keeps apart have separate folders below ``path``, each used by
    one server at a time; a server waits up to half a minute for the previous one to end. Raises
    ``TierUnavailableError``.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        capacity: str | int,
        policy: str = "lru",
        io_threads: int = 8,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        del locality  # a local disk in all cases; vLLM only publishes this value
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._open: set[concurrent.futures.Future[None]] = set()
        folder, namespace = _folder_and_namespace(Path(path), offloading_spec, self._rows.shape[1])
        self._folder = folder
        options = LmdbOptions(
            namespace=namespace, record_bytes=self._rows.shape[1], io_threads=io_threads
        )
        self._tier = EvictingTier(
            LmdbTier(folder, parse_size(capacity), options=options),
            contained(make_policy(policy), tier_type),
            describe=_describe,
            causes=(RemoveCause.EVICTED, RemoveCause.DROPPED),
        )
        self._is_shut = False
        """True after a failed reset: the stored blocks may belong to other weights."""
        self._loop = EventLoopThread("kvtiers-secondary")
        try:
            self._start_patiently()
        except (TierError, ValueError, TimeoutError) as error:
            # ValueError means that the capacity is too small
            self._close()
            why = str(error) or f"it did not open within {SECONDARY_OPEN_TIMEOUT_S:g} s"
            raise TierUnavailableError(f"kvtiers: {tier_type} at {folder}: {why}") from error

    def _start_patiently(self) -> None:
        """Start, while a server that is about to end may still hold the folder."""
        patience = Patience(lambda line: logger.warning("kvtiers: %s: %s", self.tier_type, line))
        patience.repeat(self._start_now, FolderInUseError, lambda error: error.what)

    def _start_now(self) -> None:
        self._loop.call(self._start(), SECONDARY_OPEN_TIMEOUT_S)

    async def _start(self) -> None:
        info = await self._tier.open()
        self._epoch = info.epoch
        if info.epoch % 2:
            # only the previous server had these weights, which were changed in place (0013)
            await self._new_epoch()

    async def _new_epoch(self) -> None:
        self._epoch += 1
        await self._tier.reset(self._epoch)

    # -- vLLM's thread -----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_held = not self._is_shut and key in self._tier
        return LookupResult.HIT if is_held else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load(job_metadata))

    def _submit(self, job: TransferJob, work: Coroutine[Any, Any, JobResult]) -> None:
        if self._is_shut:
            work.close()
            self._done.put(JobResult(job.job_id, success=False, successful_keys=()))
            return
        self._open.add(self._loop.start(self._run(job, work)))

    async def _run(self, job: TransferJob, work: Coroutine[Any, Any, JobResult]) -> None:
        """Carry out one job and report its result, even if it fails."""
        try:
            result = await work
        except Exception as error:  # vLLM runs into an assertion if a job never ends
            logger.warning("kvtiers: %s: job %d failed: %s", self.tier_type, job.job_id, error)
            result = JobResult(job.job_id, success=False, successful_keys=())
        self._done.put(result)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._open = {future for future in self._open if not future.done()}
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def has_pending_work(self) -> bool:
        return bool(self._open)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        held = [key for key in keys if key in self._tier]
        if held:
            self._open.add(self._loop.start(self._touch(held)))

    def drain_jobs(self) -> None:
        """Wait for every transfer, then forget all stored blocks, because vLLM resets its caches.

        vLLM's own tiers keep the old blocks, but blocks of other weights may follow under the same
        hashes.

        The wait has no bound, because vLLM reuses the memory of these transfers as soon as this
        returns. A reset that fails disables the tier until another one succeeds.
        """
        while left := concurrent.futures.wait(self._open, DRAIN_WARNING_S).not_done:
            logger.warning(
                "kvtiers: %s: reset is waiting for %d transfers; the disk does not respond",
                *(self.tier_type, len(left)),
            )
        self._is_shut = True
        self._epoch += self._epoch % 2
        try:
            self._loop.call(self._new_epoch(), RESET_TIMEOUT_S)
        except (TierError, TimeoutError) as error:
            logger.error(
                "kvtiers: %s could not be reset and is not used until a reset succeeds. If you "
                "restart the server before that, delete %s: %r",
                *(self.tier_type, self._folder, error),
            )
            return
        self._is_shut = False

    def shutdown(self) -> None:
        """Finish the work in flight, within a minute."""
        concurrent.futures.wait(self._open, SECONDARY_CLOSE_TIMEOUT_S)
        self._close()

    def _close(self) -> None:
        try:
            self._loop.call(self._tier.aclose(), SECONDARY_CLOSE_TIMEOUT_S)
        except (TierError, TimeoutError) as error:
            logger.warning("kvtiers: %s was not closed: %s", self.tier_type, error)
        self._loop.stop()

    # -- event loop thread -----------------------------------------------------------------------

    async def _store(self, job: TransferJob) -> JobResult:
        started = time.perf_counter()
        keys, rows = list(job.keys), self._rows_of(job)
        written = await self._tier.write(keys, rows)
        is_good = all(outcome is WriteOutcome.OK for outcome in written)
        return self._result(job, is_good, keys, started)

    async def _load(self, job: TransferJob) -> JobResult:
        started = time.perf_counter()
        keys, rows = list(job.keys), self._rows_of(job)
        outcomes = await self._tier.read(keys, rows)
        good = [key for key, got in zip(keys, outcomes, strict=True) if got is ReadOutcome.OK]
        return self._result(job, len(good) == len(keys), good, started)

    async def _touch(self, keys: Sequence[OffloadKey]) -> None:
        with contextlib.suppress(TierError):  # the next read or write reports it
            await self._tier.touch(keys)

    def _rows_of(self, job: TransferJob) -> list[Buffer]:
        return [self._rows[int(chunk)] for chunk in job.chunk_ids]

    def _result(
        self, job: TransferJob, is_good: bool, good: Sequence[OffloadKey], started: float
    ) -> JobResult:
        return JobResult(
            job.job_id,
            success=is_good,
            successful_keys=None if is_good else good,
            transfer_time=time.perf_counter() - started,
            transfer_bytes=len(good) * self._rows.shape[1],
        )


def _describe(key: bytes, payload_bytes: int) -> EntryInfo:
    return EntryInfo(get_offload_group_idx(OffloadKey(key)), size_bytes=payload_bytes)


def _folder_and_namespace(root: Path, spec: Any, row_bytes: int) -> tuple[Path, bytes]:
    """The folder, and the namespace of its records.

    The namespace contains everything that vLLM's file tier distinguishes by its path, the bytes of
    a chunk, and every setting that decides what is computed.
    """
    mapper = FileMapper.from_offloading_spec(str(root), spec, spec.blocks_per_chunk)
    fields = mapper.get_run_config() | {"row_bytes": row_bytes, "rank": mapper.rank}
    fields |= {"content": _content(spec.config)}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
    if found := location_problem(root):
        raise TierUnavailableError("kvtiers: " + ". ".join(found))
    folder = root / f"vllm-{digest.hex()[:16]}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder, digest[:NAMESPACE_BYTES]


def _content(config: Any) -> dict[str, Any]:
    """The facts that decide the bytes of a block.

    vLLM passes only the model's name to a tier, so this function looks up vLLM's whole
    configuration in this process. If it is not found, or if there are adapters (whose content is
    unknown here), only this engine can use the blocks.
    """
    found = configs_of(config.engine_id)
    why = "vLLM's configuration was not found in this process"
    if found and found[0].lora_config is not None:
        why = "vLLM does not report which LoRA adapters are loaded"
    elif found:
        content = content_of(found[0])
        engine = content["model"]["weights"].get("engine")
        if engine is None:
            return content
        why = f"the weights of {config.model.name} are unknown: they may change, or are in no file"
        logger.warning(_NOT_AFTER_RESTART, why)
        return {"engine": engine}
    logger.warning(_NOT_AFTER_RESTART, why)
    return {"engine": config.engine_id}


_NOT_AFTER_RESTART = "kvtiers: stored blocks are not used after a restart: %s"

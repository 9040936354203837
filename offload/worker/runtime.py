"""Opens one rank: the slab of its CPU tier, the copy engine, the lower tiers and the executor.

The connector's worker side and the in-process manager both build their rank here, and nowhere else.
The caller owns the result and closes it; until everything is open, an exit stack closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from offload.config.schema import OffloadConfig, SlotCounts, slot_counts
from offload.config.tier_capacity import check_capacity
from offload.errors import CapacityError, ConfigError, Problem, TierUnavailableError
from offload.layout.keys import GROUP_BYTES, groups_of, joined
from offload.layout.registration import Registration
from offload.messages.report import RankState, RankTier
from offload.namespaces.manifest import Namespace
from offload.worker.executor import Executor
from offload.worker.limits import ExecutorLimits
from offload.worker.tier_factory import scrub_limits
from offload.worker.tier_monitor import close_tier
from tiers.base import KeyColumn, SharedTier, StoredKeys, Tier
from tiers.copy.base import CopyEngine, GroupRegions
from tiers.copy.host_engine import HostCopyEngine
from tiers.slab.slab import HostSlab

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

logger = logging.getLogger(__name__)

UNDO_TIMEOUT_S = 2.0
"""Time limit for closing a tier after a later step of the start has failed."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The CPU tier of one rank, and the engine that copies between it and the KV caches.

    Slots have ``slot_bytes``. The first ``counts.staging`` slots are staging buffers (they are
    pinned first); the planner owns the ``counts.slots`` slots after them.
    """

    slab: HostSlab
    engine: CopyEngine
    groups: tuple[GroupRegions, ...]
    counts: SlotCounts
    slot_bytes: int

    @property
    def record_bytes(self) -> int:
        """Bytes of the smallest record that the tiers will get."""
        return min(group.record_bytes for group in self.groups)

    @property
    def addresses(self) -> range:
        """The memory that payloads are read into and written from."""
        first = self.slab.slot_address(0)
        return range(first, first + self.slab.slot_stride * self.slab.slot_count)


@dataclass(frozen=True, slots=True)
class UnopenedTier:
    """A lower tier to open. ``where`` names it in error messages and ``name`` in metrics (``""``
    for the tier's own name); ``option`` is the configuration key of its capacity, if it has one;
    ``set_aside`` counts folders that were moved out of its way."""

    tier: Tier
    where: str
    name: str = ""
    option: str = ""
    set_aside: int = 0


@dataclass(frozen=True, slots=True)
class OpenRank:
    """A rank that is ready to ``start`` its executor, with the facts that the planner needs."""

    executor: Executor
    state: RankState


def make_memory(
    config: OffloadConfig, registration: Registration, shares: int, undo: ExitStack | AsyncExitStack
) -> RankMemory:
    """Allocate the CPU tier, or one of ``shares`` equal parts of it, for these KV caches.

    ``undo`` receives a callback that releases each part. Raises ``ConfigError`` for capacities
    below one chunk and ``CapacityError`` if the memory is not available.
    """
    groups = registration.groups
    slot_bytes = max(group.record_bytes for group in groups)
    smallest = min(group.record_bytes for group in groups)
    problems = check_capacity(config, slot_bytes, shares, smallest)
    if problems:
        raise ConfigError(problems)
    counts = slot_counts(config, slot_bytes, shares)
    device = registration.device
    total = counts.slots + counts.staging
    slab = make_slab(slot_bytes, total, device, config.cpu.pin, at_once=counts.staging)
    undo.callback(slab.close)
    engine = make_engine(registration, slab, device)
    undo.callback(engine.close)
    return RankMemory(slab, engine, groups, counts, slot_bytes)


def make_slab(
    slot_bytes: int, slots: int, device: torch.device, pin: str, *, at_once: int = 0
) -> HostSlab:
    """The slots of the CPU tier, pinned for a GPU unless ``pin`` is ``"off"``: ``at_once`` of them
    before this returns, the others in the background."""
    pins = device.type == "cuda" and pin != "off"
    try:
        with ExitStack() as undo:
            node = _gpu_node(device) if pins else None
            slab = HostSlab(
                slot_bytes,
                slots,
                pin=pins,
                pin_fallback=pin == "prefer",
                numa_node=node,
            )
            undo.callback(slab.close)
            if pins:  # pinning the first piece shows whether there is a memlock limit
                slab.wait_ready(max(1, at_once))
            undo.pop_all()
        return slab
    except Exception as error:  # whatever the error, there is no CPU tier without memory
        raise CapacityError(f"kvtiers: the CPU tier cannot be set up: {error}") from error


def _gpu_node(device: torch.device) -> int | None:
    from tiers.copy.cuda_engine import gpu_node

    return gpu_node(device.index)


def make_engine(registration: Registration, slab: HostSlab, device: torch.device) -> CopyEngine:
    """The copy engine for the kind of device that the KV caches lie on."""
    groups, num_blocks = registration.groups, registration.num_blocks
    if device.type == "cuda":
        from tiers.copy.cuda_engine import CudaCopyEngine

        return CudaCopyEngine(groups, slab, device=device.index, num_blocks=num_blocks)
    return HostCopyEngine(groups, slab, num_blocks=num_blocks)


async def open_rank(
    config: OffloadConfig,
    memory: RankMemory,
    tiers: Sequence[UnopenedTier],
    undo: AsyncExitStack,
    *,
    rank: int = 0,
    shares: int = 1,
    namespace: Namespace | None = None,
    verifier: Verifier | None = None,
) -> OpenRank:
    """Open the tiers and make the executor; ``undo`` receives a callback that closes each tier.

    Raises ``ConfigError`` for a tier whose configured capacity is too small, and
    ``TierUnavailableError`` for anything else that a tier raises.
    """
    states = []
    for unopened in tiers:
        undo.push_async_callback(close_tier, unopened.tier, UNDO_TIMEOUT_S)
        states.append(await _open_tier(unopened, memory.groups))
    limits = ExecutorLimits(config.load_timeout_s, config.fence_timeout_s, config.tier_timeout_s)
    counts = memory.counts
    executor = Executor(
        memory.slab,
        memory.engine,
        memory.groups,
        [unopened.tier for unopened in tiers],
        staging=range(counts.staging),
        limits=limits,
        rank=rank,
        verifier=verifier,
        scrubs=scrub_limits(config, shares),
    )
    for number, unopened in enumerate(tiers):
        executor.stats.opened(number, unopened.tier.stats(), unopened.set_aside)
    state = RankState(
        rank,
        namespace or Namespace.of({}),
        counts.staging,
        counts.slots,
        memory.slot_bytes,
        tuple(states),
        executor.usable_slots,
        memory.engine.path_infos(),
    )
    return OpenRank(executor, state)


async def _open_tier(unopened: UnopenedTier, groups: Sequence[GroupRegions]) -> RankTier:
    try:
        return await _opened(unopened, groups)
    except ValueError as error:  # the tier's share is too small
        if not unopened.option:
            raise _unavailable(unopened, error) from error
        fix = "Increase it, or remove other data below the path (kvtiers clear)."
        raise ConfigError([Problem(unopened.option, str(error), fix)]) from error
    except Exception as error:  # the tier may be third-party code
        raise _unavailable(unopened, error) from error


def _unavailable(unopened: UnopenedTier, error: Exception) -> TierUnavailableError:
    return TierUnavailableError(f"kvtiers: {unopened.where}: {error}")


async def _opened(unopened: UnopenedTier, groups: Sequence[GroupRegions]) -> RankTier:
    tier = unopened.tier
    info = await tier.open()
    sizes = {group.group: group.record_bytes for group in groups}
    footprints = {group: tier.footprint_bytes(size) for group, size in sizes.items()}
    columns: list[KeyColumn] = []
    others: list[bytes] = []
    is_shared = isinstance(tier, SharedTier)
    if not is_shared:
        async for batch in tier.keys():
            fits = _fits(batch, sizes)
            columns.append(batch.column if fits.all() else batch.column[fits])
            others += batch.column[~fits].tolist()
    if others:  # these records cannot be loaded, and no index would count their space
        await tier.delete(others)
    name = unopened.name or info.name
    return RankTier(name, info.capacity_bytes, footprints, joined(columns), is_shared)


def _fits(found: StoredKeys, sizes: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Mark the records that belong to a group and have the length of its chunks."""
    fits = np.zeros(found.column.size, np.bool_)
    if found.column.itemsize > GROUP_BYTES:
        groups = groups_of(found.column)
        for group, size in sizes.items():
            fits |= (groups == group) & (found.payload_bytes == size)
    return fits

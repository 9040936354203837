"""The memory of one rank: the slots of its CPU tier and the engine that copies to and from them.

The caller of ``make_memory`` owns the result and closes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

import torch

from offload.config.schema import OffloadConfig, slot_counts
from offload.config.tier_capacity import check_capacity
from offload.errors import CapacityError, ConfigError
from offload.layout.registration import Registration
from tiers.copy.base import CopyEngine, GroupRegions
from tiers.copy.host_engine import HostCopyEngine
from tiers.slab.slab import HostSlab


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The CPU tier of one rank, and the engine that copies between it and the KV caches.

    ``groups`` are by number. ``staging`` are slots that the planner does not use; chunks without a
    slot pass through them.
    """

    slab: HostSlab
    engine: CopyEngine
    groups: Mapping[int, GroupRegions]
    staging: Sequence[int] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: of the largest record."""
        return max(group.record_bytes for group in self.groups.values())

    @property
    def record_bytes(self) -> int:
        """Bytes of the smallest record that the tiers will get."""
        return min(group.record_bytes for group in self.groups.values())

    @property
    def slots(self) -> int:
        """The number of the planner's slots."""
        return self.slab.slot_count - len(self.staging)

    @property
    def addresses(self) -> range:
        """The memory that payloads are read into and written from."""
        first = self.slab.slot_address(0)
        return range(first, first + self.slab.slot_stride * self.slab.slot_count)


def make_memory(
    config: OffloadConfig, registration: Registration, shares: int, undo: ExitStack | AsyncExitStack
) -> RankMemory:
    """Allocate the CPU tier, or one of ``shares`` equal parts of it, for these KV caches.

    The first slots are the staging slots, because they are pinned first. ``undo`` receives a
    callback that releases each part. Raises ``ConfigError`` for capacities
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
    regions = {group.group: group for group in groups}
    return RankMemory(slab, engine, regions, range(counts.staging))


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

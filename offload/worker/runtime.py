"""Opens one rank over its memory: the lower tiers and the executor.

The connector's worker side and the in-process manager both build their rank here, and nowhere else.
The caller owns the result and closes it; until everything is open, an exit stack closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from offload.config.schema import OffloadConfig
from offload.errors import ConfigError, Problem, TierUnavailableError
from offload.layout.keys import GROUP_BYTES, groups_of, joined
from offload.messages.report import RankState, RankTier
from offload.namespaces.manifest import Namespace
from offload.worker.executor import Executor
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.rank_memory import RankMemory
from offload.worker.tier_factory import scrub_limits
from offload.worker.tier_monitor import close_tier
from policies.safe_text import safe_str
from tiers.base import KeyColumn, SharedTier, StoredKeys, Tier

if TYPE_CHECKING:
    from offload.worker.block_verifier import Verifier

logger = logging.getLogger(__name__)

UNDO_TIMEOUT_S = 2.0
"""If a step of the start fails, each tier that is already open must close within this time."""


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
    on_opening: Callable[[int], object] = lambda _number: None,
) -> OpenRank:
    """Open the tiers and make the executor; ``undo`` receives a callback that closes each tier.

    Calls ``on_opening`` with a tier's position in ``tiers`` before it opens this tier. Raises
    ``ConfigError`` for a tier whose configured capacity is too small, and ``TierUnavailableError``
    for anything else that a tier raises.
    """
    states = []
    for number, unopened in enumerate(tiers):
        on_opening(number)
        undo.push_async_callback(close_tier, unopened.tier, UNDO_TIMEOUT_S)
        states.append(await _open_tier(unopened, memory))
    limits = ExecutorLimits(config.load_timeout_s, config.fence_timeout_s, config.tier_timeout_s)
    executor = Executor(
        memory,
        [unopened.tier for unopened in tiers],
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
        len(memory.staging),
        memory.slots,
        memory.slot_bytes,
        tuple(states),
        executor.usable_slots,
        memory.engine.path_infos(),
    )
    return OpenRank(executor, state)


async def _open_tier(unopened: UnopenedTier, memory: RankMemory) -> RankTier:
    try:
        return await _opened(unopened, memory)
    except ValueError as error:  # the tier's share is too small
        if not unopened.option:
            raise _unavailable(unopened, error) from error
        fix = "Increase it, or remove other data below the path (kvtiers clear)."
        raise ConfigError([Problem(unopened.option, safe_str(error), fix)]) from error
    except Exception as error:  # the tier may be third-party code
        raise _unavailable(unopened, error) from error


def _unavailable(unopened: UnopenedTier, error: Exception) -> TierUnavailableError:
    return TierUnavailableError(f"kvtiers: {unopened.where}: {safe_str(error)}")


async def _opened(unopened: UnopenedTier, memory: RankMemory) -> RankTier:
    tier = unopened.tier
    info = await tier.open()
    sizes = {number: group.record_bytes for number, group in memory.groups.items()}
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

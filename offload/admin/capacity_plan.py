"""The arithmetic of ``kvtiers plan``: capacity, hits, whether loading pays, and bytes written.

Pure functions: they turn sizes, speeds and the simulator's result into an estimate. Nothing is
measured here: the user gives the speeds, or the notes say which ones are assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.config.schema import STAGING_MAX
from offload.sizes import DAY_S, rounded_size
from policies.simulation.simulator import Result
from policies.simulation.trace import Trace
from tiers.lmdb.files import payload_capacity_bytes

LINK_BYTES_PER_S = 20e9
DISK_BYTES_PER_S = 2e9
ARITHMETIC_SHARE = 0.4
"""Share of a GPU's peak that prefill usually reaches; an assumption."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``token_bytes`` and ``chunk_bytes`` are sums over all ranks; ``parameters`` is 0 if
    unknown."""

    name: str
    token_bytes: float
    chunk_tokens: int
    ranks: int = 1
    parameters: float = 0.0

    @property
    def chunk_bytes(self) -> float:
        """Bytes of the chunks that hold ``chunk_tokens`` tokens."""
        return self.token_bytes * self.chunk_tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes and speeds in bytes per second; 0 for what does not exist or was not given.

    ``link_bytes_per_s`` is for one rank, ``disk_*`` for the server. ``prefill_tokens_per_s`` and
    ``gpu_flops`` are for the server; ``write_budget_bytes`` is per day.
    """

    cpu_bytes: int
    disk_bytes: int = 0
    link_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    gpu_flops: float = 0.0
    write_budget_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """One tier of the estimate.

    ``loads_tokens_per_s`` is how many tokens per second the tier can restore. Loading pays if the
    model computes fewer tokens per second. ``pays`` is ``None`` if the computing speed is unknown.
    """

    name: str
    capacity_bytes: int
    tokens: int
    chunks: int
    blocks: int
    bytes_per_s: float
    loads_tokens_per_s: float
    pays: bool | None
    hit_ratio: float | None = None
    reads_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """The values that ``kvtiers plan`` prints. Ratios are shares of the prompt tokens; ``None``
    means unknown."""

    model: ModelSize
    tiers: tuple[TierEstimate, ...]
    prefill_tokens_per_s: float | None
    requests: str = ""
    prompt_tokens_per_s: float | None = None
    hit_ratio: float | None = None
    hit_ratio_max: float | None = None
    compute_saved: float | None = None
    disk_writes_per_day: float | None = None
    write_budget: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The estimate as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulator's result: hits with these capacities, and with an infinite cache."""

    trace: Trace
    result: Result
    endless: Result

    @property
    def seconds(self) -> float:
        """The time from the first request to the last."""
        requests = self.trace.requests
        return requests[-1].time_s - requests[0].time_s if requests else 0.0


def capacity_blocks(model: ModelSize, machine: Machine, block_tokens: int) -> tuple[int, int]:
    """The numbers of the trace's blocks that fit into the CPU tier and onto the disk."""
    cpu, disk = _tokens(model, machine)
    return cpu // block_tokens, disk // block_tokens


def _tokens(model: ModelSize, machine: Machine) -> tuple[int, int]:
    staging = min(machine.cpu_bytes // 16, STAGING_MAX) if machine.disk_bytes else 0
    disk_bytes = 0
    if machine.disk_bytes:
        record_bytes = max(4096, int(model.chunk_bytes / model.ranks))
        disk_bytes = payload_capacity_bytes(machine.disk_bytes, record_bytes)
    return (
        int((machine.cpu_bytes - staging) / model.token_bytes),
        int(disk_bytes / model.token_bytes),
    )


def estimate_capacity(
    model: ModelSize, machine: Machine, block_tokens: int, simulated: Simulated | None
) -> CapacityEstimate:
    """Estimate a configuration. Raises ``ValueError`` for a disk too small for its own index."""
    notes: list[str] = []
    speed = _prefill(model, machine, notes)
    tiers = _tiers(model, machine, block_tokens, speed, notes)
    notes += [_does_not_pay(tier.name) for tier in tiers if tier.pays is False]
    if simulated is None:
        return CapacityEstimate(model, tiers, speed, notes=tuple(notes))
    result, seconds = simulated.result, simulated.seconds
    rate = result.prompt_tokens / seconds if seconds > 0 else None
    tiers = _with_hits(tiers, result, rate, model)
    writes = None
    if machine.disk_bytes and seconds > 0:
        per_block = model.token_bytes * simulated.trace.block_tokens
        writes = result.extra["lower_writes"] * per_block / seconds * DAY_S
    _judge(tiers, writes, machine, notes)
    if seconds and seconds < DAY_S / 24:
        notes.append(f"the requests cover only {seconds:,.0f} s and start with an empty cache")
    return CapacityEstimate(
        model,
        tiers,
        speed,
        requests=simulated.trace.name,
        prompt_tokens_per_s=rate,
        hit_ratio=result.token_hit_ratio,
        hit_ratio_max=simulated.endless.token_hit_ratio,
        compute_saved=result.flops_saved_ratio,
        disk_writes_per_day=writes,
        write_budget=machine.write_budget_bytes or None,
        notes=tuple(notes),
    )


def _does_not_pay(tier: str) -> str:
    """Describe how a server would react. It compares loading with computing for lower tiers only
    (``offload.planner.tier_health``)."""
    what = f"{tier}: computing is faster than loading"
    if tier == "cpu":
        return f"{what}, and break_even covers lower tiers only: loads would slow requests down"
    return f"{what}, so break_even leaves it out"


def _prefill(model: ModelSize, machine: Machine, notes: list[str]) -> float | None:
    """Prompt tokens per second that the model computes, as given or as estimated."""
    if machine.prefill_tokens_per_s:
        return machine.prefill_tokens_per_s
    if machine.gpu_flops and model.parameters:
        speed = ARITHMETIC_SHARE * machine.gpu_flops / (2 * model.parameters)
        notes.append(
            f"estimated, not measured: computing {speed:,.0f} tokens/s, from "
            f"{ARITHMETIC_SHARE:.0%} of {machine.gpu_flops / 1e12:,.0f} TFLOPS and "
            f"{model.parameters / 1e9:.1f} billion parameters (for a mixture of experts, give the "
            f"active parameters with --parameters)"
        )
        return speed
    estimate = "--parameters" if machine.gpu_flops else "--gpu-tflops"
    notes.append(
        "the speed of computing prompts is not known: give --prefill-tokens-per-s, or "
        f"{estimate} for an estimate"
    )
    return None


def _tiers(
    model: ModelSize,
    machine: Machine,
    block_tokens: int,
    prefill: float | None,
    notes: list[str],
) -> tuple[TierEstimate, ...]:
    link = machine.link_bytes_per_s or LINK_BYTES_PER_S
    disk = machine.disk_bytes_per_s or DISK_BYTES_PER_S
    if not machine.link_bytes_per_s:
        notes.append(f"assumed, not measured: {_speed_text(link)} to each GPU (--link)")
    if machine.disk_bytes and not machine.disk_bytes_per_s:
        notes.append(f"assumed, not measured: the disk reads {_speed_text(disk)} (--disk-read)")
    cpu_tokens, disk_tokens = _tokens(model, machine)
    speeds = [("cpu", machine.cpu_bytes, cpu_tokens, link * model.ranks)]
    if machine.disk_bytes:
        # Data from the disk also crosses the link, at the same time.
        speeds.append(("disk", machine.disk_bytes, disk_tokens, min(disk, link * model.ranks)))
    return tuple(
        TierEstimate(
            name,
            size,
            tokens,
            tokens // model.chunk_tokens,
            tokens // block_tokens,
            bytes_per_s,
            bytes_per_s / model.token_bytes,
            None if prefill is None else bytes_per_s / model.token_bytes > prefill,
        )
        for name, size, tokens, bytes_per_s in speeds
    )


def _speed_text(bytes_per_s: float) -> str:
    return f"{rounded_size(bytes_per_s)}/s"


def _with_hits(
    tiers: Sequence[TierEstimate], result: Result, rate: float | None, model: ModelSize
) -> tuple[TierEstimate, ...]:
    upper = result.extra.get("upper_ratio", result.token_hit_ratio)
    lower = result.extra.get("lower_ratio", 0.0)
    found = []
    for tier, ratio in zip(tiers, (upper, lower), strict=False):
        reads = None if rate is None else ratio * rate * model.token_bytes
        found.append(replace(tier, hit_ratio=ratio, reads_bytes_per_s=reads))
    return tuple(found)


def _judge(
    tiers: Sequence[TierEstimate], writes: float | None, machine: Machine, notes: list[str]
) -> None:
    """Add a note for each unrealistic part of the estimate."""
    notes += [
        f"{tier.name}: these hits need {_speed_text(tier.reads_bytes_per_s)}, more than its "
        f"{_speed_text(tier.bytes_per_s)}: some of them will be computed"
        for tier in tiers
        if tier.reads_bytes_per_s is not None and tier.reads_bytes_per_s > tier.bytes_per_s
    ]
    budget = machine.write_budget_bytes
    if writes is not None and budget and writes > budget:
        notes.append(
            "writes to the disk would exceed its budget: with write_budget_per_day, "
            "stores beyond the budget are skipped, and hits are fewer than shown"
        )

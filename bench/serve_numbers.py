"""Turns the batches of ``bench serve`` into rows and verdicts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.scenario import Row, median, percentile
from bench.serve_engine import Batch
from bench.serve_systems import BASELINE, BLOCK_TOKENS, OURS, SYSTEMS

GOAL = 0.98
"""Goal for the throughput without hits, as a share of the throughput without offloading."""
RESTORED_ENOUGH = 0.9
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of ``size`` tokens. A prefix of each prompt, with the share ``hit`` of it, was stored
    before."""

    size: int
    hit: float

    def __str__(self) -> str:
        known = f"{self.hit:.0%} stored before" if self.hit else "nothing to hit"
        return f"{self.size} tokens, {known}"

    @property
    def restorable(self) -> float:
        """The share of a prompt that can be restored: whole blocks."""
        return int(self.hit * self.size) // BLOCK_TOKENS * BLOCK_TOKENS / self.size


@dataclass(slots=True)
class Samples:
    """The batches of each case and system, by the names of the systems' rows. The n-th batches of
    all systems had the same prompts and ran directly after each other."""

    batches: dict[Case, dict[str, list[Batch]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, case: Case, system: str, batch: Batch) -> None:
        self.batches[case][system].append(batch)

    def restored_nothing(self) -> list[str]:
        """Systems that restored none of the stored tokens."""
        restored: dict[str, float] = {}
        for case, systems in self.batches.items():
            for system, found in systems.items():
                if case.restorable and system != BASELINE:
                    tokens = sum(batch.restored for batch in found)
                    restored[system] = restored.get(system, 0.0) + tokens
        return [system for system, tokens in restored.items() if not tokens]

    def rows(self) -> list[Row]:
        """Rows for every case and every system."""
        return [
            _row(str(case), system, found, systems.get(BASELINE, []))
            for case, systems in self.batches.items()
            for system, found in systems.items()
        ]


def _row(case: str, system: str, found: Sequence[Batch], plain: Sequence[Batch]) -> Row:
    values = _values(found, plain)
    intervals = {
        "tokens/s": interval([throughput(batch) for batch in found]),
        # requests of the same batch are not independent
        "TTFT p50 ms": interval([1e3 * median(batch.ttft_s) for batch in found]),
    }
    if "ratio" in values:
        intervals["ratio"] = values["low"], values["high"]
    return Row(case, system, values, intervals)


def throughput(batch: Batch) -> float:
    """Prompt and generated tokens per second."""
    return (batch.prompt_tokens + batch.output_tokens) / batch.seconds


def _values(found: Sequence[Batch], plain: Sequence[Batch]) -> dict[str, float]:
    times = [1e3 * ttft for batch in found for ttft in batch.ttft_s]
    prompts = sum(batch.prompt_tokens for batch in found)
    values = {
        "tokens/s": median([throughput(batch) for batch in found]),
        "TTFT p50 ms": median(times),
        "TTFT p99 ms": percentile(times, 0.99),
        "restored": sum(batch.restored for batch in found) / prompts,
        "from disk": sum(batch.loaded_from("lmdb") for batch in found) / prompts,
    }
    values |= _own_shares(found)
    if plain:
        ratios = ratios_of(throughput, found, plain)
        low, high = interval(ratios)
        values |= {
            "ratio": median(ratios),
            "low": low,
            "high": high,
            "TTFT ratio": median(ratios_of(lambda b: median(b.ttft_s), found, plain)),
            "CPU ratio": median(ratios_of(lambda b: b.cpu_s, found, plain)),
        }
    return values


def _own_shares(found: Sequence[Batch]) -> dict[str, float]:
    """The time of kvtiers' hooks and threads, as shares of the batches' time. Empty for other
    systems."""
    seconds = sum(batch.seconds for batch in found)
    shares = {
        "hooks": sum(batch.hook_s for batch in found) / seconds,
        "threads": sum(batch.thread_cpu_s for batch in found) / seconds,
    }
    return shares if shares["threads"] else {}


def ratios_of(
    value: Callable[[Batch], float], found: Sequence[Batch], plain: Sequence[Batch]
) -> list[float]:
    """Ratios batch by batch, so that noise on the machine affects both sides."""
    pairs = zip(found, plain, strict=False)
    return [value(one) / value(other) for one, other in pairs if value(other)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A distribution-free confidence interval of the median, with probability ``CONFIDENCE``: two
    order statistics whose ranks follow from the binomial distribution. With fewer than six values
    even the extremes do not reach that probability; they are returned anyway."""
    ranked = sorted(values)
    count = len(ranked)
    if not count:
        return float("nan"), float("nan")
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank += 1
    edge = max(0, rank - 1)
    return ranked[edge], ranked[count - 1 - edge]


def verdicts(samples: Samples) -> list[str]:
    """Compare the run with the goal, and report rows without the hits that their case requires."""
    ours = {SYSTEMS[name].name for name in OURS}
    notes = []
    for case, systems in samples.batches.items():
        plain = systems.get(BASELINE, [])
        for system, found in systems.items():
            notes += _untrue(case, system, found)
            if case.hit == 0.0 and system in ours and plain:
                ratios = ratios_of(throughput, found, plain)
                notes.append(_cost(case, system, ratios, _own_shares(found)))
    return notes


def _cost(case: Case, system: str, ratios: list[float], own: Mapping[str, float]) -> str:
    middle, (low, high) = median(ratios), interval(ratios)
    verdict = "met" if middle >= GOAL else "MISSED"
    if low < GOAL <= high:
        verdict += ", but the interval includes both verdicts"
    return (
        f"{case}, {system}: throughput {middle:.3f} of that without offloading ({CONFIDENCE:.0%} "
        f"interval {low:.3f} to {high:.3f}, {len(ratios)} pairs); goal {GOAL}: {verdict}"
        + "".join(f"; {name} {share:.2%} of the time" for name, share in own.items())
    )


def _untrue(case: Case, system: str, found: Sequence[Batch]) -> list[str]:
    """Messages about batches whose hits differ from those of their case."""
    notes = []
    wanted = 0.0 if system == BASELINE else case.restorable
    short = [b for b in found if b.restored < RESTORED_ENOUGH * wanted * b.prompt_tokens]
    if short:
        shares = [batch.restored / batch.prompt_tokens for batch in short]
        notes.append(
            f"NOT RESTORED: {case}, {system}: {len(short)} of {len(found)} batches restored a "
            f"share of {median(shares):.2f} instead of {wanted:.2f}"
        )
    if case.hit == 0.0 and any(batch.restored for batch in found):
        notes.append(f"INVALID: {case}, {system}: something was restored")
    if any(batch.gpu_hits for batch in found):
        notes.append(f"INVALID: {case}, {system}: hits in vLLM's own prefix cache")
    return notes

"""Runs policies on request traces. The policies are the same objects as in a server.

The model, per request: the hit is the longest prefix of the prompt whose blocks are all resident.
All other blocks of the prompt are stored, as far as the tier can free space without evicting this
request's blocks. Then the request touches its blocks once, in prefix order. The tier starts empty,
and its first misses count. Policies that depend on time get the trace's time, so a run can be
repeated exactly (except ``ns_per_op``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from policies import hints as names
from policies.base import AdmissionPolicy, EntryInfo, EvictionPolicy, Key, RemoveCause
from policies.simulation.belady import infinite_hits, optimum_hits
from policies.simulation.trace import Request, Trace

HINT_LEVELS = ("none", "end", "all")
"""The hints that the policies get from a trace: none, only the ends of sessions, or all."""


@dataclass(frozen=True, slots=True)
class FlopModel:
    """The cost of computing a prompt: one term per token and one per pair of tokens.

    The defaults are those of a dense model of 8 billion parameters with 32 layers of width 4096:
    2 FLOPs per parameter and token, 4 x layers x width per token and earlier token.
    """

    per_token: float = 2 * 8e9
    per_pair: float = 4 * 32 * 4096

    def prefix(self, tokens: int) -> float:
        """FLOPs to compute the first ``tokens`` tokens of a prompt."""
        return self.per_token * tokens + self.per_pair * tokens * tokens / 2


@dataclass(slots=True)
class Result:
    """The measurements of one run. Ratios are 0 for an empty trace."""

    trace: str
    policy: str
    capacity: int
    block_tokens: int
    requests: int = 0
    prompt_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    flops: float = 0.0
    flops_saved: float = 0.0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    policy_ns: int = 0
    policy_ops: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def token_hit_ratio(self) -> float:
        """The share of prompt tokens that need no computation."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def flops_saved_ratio(self) -> float:
        """The share of the FLOPs of all prompts that these tokens save."""
        return self.flops_saved / self.flops if self.flops else 0.0

    @property
    def ns_per_op(self) -> float:
        """Mean nanoseconds in the policy for each key that was stored, touched or evicted; 0 if
        there was none."""
        return self.policy_ns / self.policy_ops if self.policy_ops else 0.0

    def count(self, request: Request, hits: int, model: FlopModel) -> None:
        """Count one request and its hit of ``hits`` blocks."""
        tokens = min(hits * self.block_tokens, request.prompt_tokens)
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.hit_blocks += hits
        self.hit_tokens += tokens
        self.flops += model.prefix(request.prompt_tokens)
        self.flops_saved += model.prefix(tokens)

    def note(self, **numbers: float) -> None:
        """Add results that only some simulations have."""
        self.extra.update(numbers)

    def count_work(self, upper: SimTier, *lower: SimTier) -> None:
        """Add what the upper tier stored and evicted, and the time spent in all policies."""
        self.stored_blocks, self.evicted_blocks = upper.stored, upper.evicted
        self.policy_ns = sum(tier.ns for tier in (upper, *lower))
        self.policy_ops = sum(tier.ops for tier in (upper, *lower))


class SimTier:
    """One tier: its resident keys, and the policy that orders them. Counts time in the policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.resident: set[Key] = set()
        self.stored = 0
        self.evicted = 0
        self.ns = 0
        self.ops = 0

    def leading(self, keys: Sequence[Key]) -> int:
        """Count the leading keys that are resident, up to the first gap."""
        resident = self.resident
        for count, key in enumerate(keys):
            if key not in resident:
                return count
        return len(keys)

    def make_space(self, count: int, protect: Iterable[Key]) -> list[Key]:
        """Evict until ``count`` keys fit, as far as possible. Returns the evicted keys."""
        missing = len(self.resident) + count - self.capacity
        if missing <= 0:
            return []
        kept = frozenset(protect)
        start = perf_counter_ns()
        gone = self.policy.victims(missing, lambda key: key not in kept)
        for key in gone:
            self.policy.remove(key, RemoveCause.EVICTED)
        self.ns += perf_counter_ns() - start
        self.ops += len(gone)
        self.evicted += len(gone)
        self.resident.difference_update(gone)
        return gone

    def insert(self, keys: Sequence[Key], infos: Sequence[EntryInfo]) -> None:
        """Insert keys, given in prefix order, tail first. They must fit."""
        insert = self.policy.insert
        start = perf_counter_ns()
        for i in range(len(keys) - 1, -1, -1):
            insert(keys[i], infos[i])
        self.ns += perf_counter_ns() - start
        self.ops += len(keys)
        self.stored += len(keys)
        self.resident.update(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Record one request's use of these keys."""
        start = perf_counter_ns()
        self.policy.touch(keys)
        self.ns += perf_counter_ns() - start
        self.ops += len(keys)

    def advise(self, keys: Sequence[Key], hints: Mapping[str, Any]) -> None:
        """Pass the hints of a request that has ended to the policy."""
        start = perf_counter_ns()
        self.policy.advise(keys, hints)
        self.ns += perf_counter_ns() - start

    def drop(self, keys: Iterable[Key]) -> None:
        """Remove keys that another tier makes redundant."""
        for key in keys:
            if key in self.resident:
                self.resident.discard(key)
                self.policy.remove(key, RemoveCause.DROPPED)

    def store(self, keys: Sequence[Key], infos: Sequence[EntryInfo], protect: Iterable[Key]) -> int:
        """Free space and insert as many of the absent ``keys`` as fit, from the first one on.
        Return their number."""
        self.make_space(len(keys), protect)
        fits = min(len(keys), self.capacity - len(self.resident))
        self.insert(keys[:fits], infos)
        return fits


class Infos:
    """Makes the ``EntryInfo`` of each block: depth, cost, and the trace's hints."""

    def __init__(self, block_tokens: int, model: FlopModel, level: str = "none") -> None:
        if level not in HINT_LEVELS:
            raise ValueError(f'unknown hint level "{level}". Available: {", ".join(HINT_LEVELS)}.')
        self._block_tokens = block_tokens
        self._model = model
        self._level = level
        self._plain: list[EntryInfo] = []

    def plain(self, depth: int) -> EntryInfo:
        """The info of the block at this depth of its prefix (0 = head), without hints."""
        while depth >= len(self._plain):
            end = (len(self._plain) + 1) * self._block_tokens
            cost = self._model.prefix(end) - self._model.prefix(end - self._block_tokens)
            self._plain.append(EntryInfo(depth_tokens=end, cost=cost))
        return self._plain[depth]

    def stored(self, request: Request, depth: int) -> EntryInfo:
        """The info of one block of a request, with the hints that are known when the block is
        stored."""
        plain = self.plain(depth)
        if self._level == "none":
            return plain
        known: dict[str, Any] = {}
        if request.session >= 0:
            known[names.SESSION] = request.session
        if self._level == "all" and request.one_shot:
            known[names.ONE_SHOT] = True
        if self._level == "all" and depth < request.pinned:
            known[names.PINNED] = True
        if not known:
            return plain
        return EntryInfo(depth_tokens=plain.depth_tokens, cost=plain.cost, hints=known)

    def ended(self, request: Request) -> dict[str, Any]:
        """The hints that are known when the request has ended."""
        known: dict[str, Any] = {}
        if self._level != "none" and request.last:
            known[names.SESSION_END] = True
        if self._level == "all" and request.stop == "tool_use":
            known[names.TOOL_CALL] = True
            if request.return_s is not None:
                known[names.RETURN_S] = request.return_s
        return known


class TraceClock:
    """The time of the request that is being simulated; policies that need the time read it here."""

    def __init__(self, *policies: EvictionPolicy | AdmissionPolicy | None) -> None:
        self._now_s = 0.0
        for policy in policies:
            if policy is not None:
                policy.use_clock(self.now_s)

    def now_s(self) -> float:
        """Seconds since the trace began."""
        return self._now_s

    def advance(self, now_s: float) -> None:
        """Advance to the time of the next request."""
        self._now_s = now_s


def simulate(
    trace: Trace,
    policy: EvictionPolicy,
    capacity: int,
    *,
    name: str = "",
    admission: AdmissionPolicy | None = None,
    hints: str = "none",
    model: FlopModel | None = None,
    progress: Callable[[int], None] | None = None,
    hit_log: list[int] | None = None,
    ns_log: list[int] | None = None,
) -> Result:
    """Run one policy on a trace, with a capacity in blocks.

    ``hit_log`` gets each request's hit in blocks, ``ns_log`` its nanoseconds in the policy.
    """
    model = model or FlopModel()
    result = Result(trace.name, name or type(policy).__name__, capacity, trace.block_tokens)
    infos = Infos(trace.block_tokens, model, hints)
    tier = SimTier(policy, capacity)
    clock, logged_ns = TraceClock(policy, admission), 0
    for index, request in enumerate(trace.requests):
        clock.advance(request.time_s)
        blocks = request.blocks()
        hits = tier.leading(blocks)
        depths = [d for d in range(hits, len(blocks)) if blocks[d] not in tier.resident]
        if admission is not None:
            depths = [d for d in depths if admission.admit(blocks[d], infos.stored(request, d))]
        if depths:
            fresh = [blocks[d] for d in depths]
            tier.store(fresh, [infos.stored(request, d) for d in depths], blocks)
        tier.touch(blocks)
        known = infos.ended(request)
        if known:
            tier.advise(blocks, known)
        result.count(request, hits, model)
        if hit_log is not None:
            hit_log.append(hits)
        if ns_log is not None:
            ns_log.append(tier.ns - logged_ns)
            logged_ns = tier.ns
        if progress is not None and index % 256 == 255:
            progress(256)
    if len(policy) != len(tier.resident):
        raise AssertionError(
            f"{result.policy} has {len(policy)} keys, the tier {len(tier.resident)}"
        )
    result.count_work(tier)
    return result


def bound(
    trace: Trace, capacity: int | None, *, model: FlopModel | None = None, uses: Any = None
) -> Result:
    """Compute an upper bound for all policies: Belady's optimum at ``capacity`` blocks, or the hits
    of an infinite cache (``None``)."""
    model = model or FlopModel()
    blocks = trace.unique_blocks() if capacity is None else capacity
    name = "infinite" if capacity is None else "optimum"
    result = Result(trace.name, name, blocks, trace.block_tokens)
    hits = infinite_hits(trace) if capacity is None else optimum_hits(trace, capacity, uses)
    for request, count in zip(trace.requests, hits, strict=True):
        result.count(request, count, model)
    return result

"""Two tiers on a request trace: a fast upper one and a large lower one, each with its policy.

Modes (which chunks are written to the lower tier, and when):

* ``write-through``: every chunk stored in the upper tier is also written to the lower one at once;
  the tiers evict independently.
* ``inclusive``: the same, but a chunk that is evicted from the lower tier is also removed from the
  upper one.
* ``exclusive``: chunks evicted from the upper tier are written to the lower one, promoted chunks
  are removed from the lower tier, and chunks that do not fit into the upper tier go directly to the
  lower one.
* ``selective``: write-through of the chunks that an admission policy admits.

A request touches its blocks in both tiers, no matter which tier served them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.base import AdmissionPolicy, EvictionPolicy, Key
from policies.simulation.simulator import FlopModel, Infos, Result, SimTier, TraceClock
from policies.simulation.trace import Request, Trace

MODES = ("write-through", "inclusive", "exclusive", "selective")


class TwoTiers:
    """The upper and the lower tier, and the mode."""

    def __init__(
        self, upper: SimTier, lower: SimTier, mode: str, admission: AdmissionPolicy | None
    ) -> None:
        if mode not in MODES:
            raise ValueError(f'unknown mode "{mode}". Available: {", ".join(MODES)}.')
        if (mode == "selective") != (admission is not None):
            raise ValueError("an admission policy is valid only with the mode selective")
        self.upper = upper
        self.lower = lower
        self._mode = mode
        self._admission = admission
        self._depth: dict[Key, int] = {}

    def hits(self, blocks: Sequence[int]) -> tuple[int, int]:
        """The number of leading blocks that are in either tier, and how many of them are only in
        the lower tier."""
        above, below = self.upper.resident, self.lower.resident
        promoted = 0
        for count, block in enumerate(blocks):
            if block not in above:
                if block not in below:
                    return count, promoted
                promoted += 1
        return len(blocks), promoted

    def serve(self, request: Request, blocks: Sequence[int], hits: int, infos: Infos) -> None:
        """Store and touch one request's blocks."""
        depths = [d for d in range(len(blocks)) if blocks[d] not in self.upper.resident]
        fresh = [blocks[d] for d in depths]
        entries = [infos.stored(request, d) for d in depths]
        gone = self.upper.make_space(len(fresh), blocks)
        fits = min(len(fresh), self.upper.capacity - len(self.upper.resident))
        self.upper.insert(fresh[:fits], entries[:fits])
        if self._mode == "exclusive":
            self._depth.update(zip(fresh, depths, strict=True))
            self.lower.drop(fresh[:fits])
            straight = [block for block in fresh[fits:] if block not in self.lower.resident]
            self._write([*straight, *reversed(gone)], infos, blocks)
        else:
            self._write_through(request, fresh, depths, infos, blocks)
        self.upper.touch(blocks)
        self.lower.touch(blocks)

    def _write_through(
        self,
        request: Request,
        fresh: Sequence[int],
        depths: Sequence[int],
        infos: Infos,
        blocks: Sequence[int],
    ) -> None:
        wanted = [d for d, b in zip(depths, fresh, strict=True) if b not in self.lower.resident]
        if self._admission is not None:
            admit = self._admission.admit
            wanted = [d for d in wanted if admit(blocks[d], infos.stored(request, d))]
        entries = [infos.stored(request, d) for d in wanted]
        gone = self.lower.make_space(len(wanted), blocks)
        fits = min(len(wanted), self.lower.capacity - len(self.lower.resident))
        self.lower.insert([blocks[d] for d in wanted[:fits]], entries[:fits])
        if self._mode == "inclusive":
            self.upper.drop(gone)

    def _write(self, keys: Sequence[Key], infos: Infos, blocks: Sequence[int]) -> None:
        entries = [infos.plain(self._depth[key]) for key in keys]
        self.lower.store(keys, entries, blocks)


def simulate_two(
    trace: Trace,
    upper: EvictionPolicy,
    lower: EvictionPolicy,
    capacities: tuple[int, int],
    mode: str,
    *,
    name: str = "",
    admission: AdmissionPolicy | None = None,
    hints: str = "none",
    model: FlopModel | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Run two policies at two capacities (in blocks). The result's ``extra`` has the share of
    prompt tokens served by each tier, and the number of blocks written to the lower tier."""
    model = model or FlopModel()
    title = name or f"{type(upper).__name__}/{type(lower).__name__}"
    result = Result(trace.name, title, sum(capacities), trace.block_tokens)
    infos = Infos(trace.block_tokens, model, hints)
    tiers = TwoTiers(SimTier(upper, capacities[0]), SimTier(lower, capacities[1]), mode, admission)
    below = 0
    clock = TraceClock(upper, lower, admission)
    for index, request in enumerate(trace.requests):
        clock.advance(request.time_s)
        blocks = request.blocks()
        hits, promoted = tiers.hits(blocks)
        tiers.serve(request, blocks, hits, infos)
        known = infos.ended(request)
        if known:
            tiers.upper.advise(blocks, known)
            tiers.lower.advise(blocks, known)
        result.count(request, hits, model)
        below += promoted
        if progress is not None and index % 256 == 255:
            progress(256)
    result.count_work(tiers.upper, tiers.lower)
    lower_ratio = below * trace.block_tokens / max(1, result.prompt_tokens)
    result.note(
        upper_ratio=result.token_hit_ratio - lower_ratio,
        lower_ratio=lower_ratio,
        lower_writes=float(tiers.lower.stored),
    )
    return result

"""Runs a request trace with its arrival times through an engine with two tiers below it.

The model. A request arrives at its recorded time and waits until fewer than ``in_flight`` requests
run. Its hit is the longest prefix whose blocks are all in one of the tiers. Blocks that are only in
the lower tier are read; requests that read at the same time take turns, ``BATCH`` blocks at a time.
Then the rest of the prompt is computed, one prompt at a time, which produces the first token. The
answer follows token by token; while a prompt is computed, each step of ``STEP_TOKENS`` generates
one token of each answer. Computed blocks are stored in both tiers, and nothing waits for that. The
GPU's own cache is not modelled, and copies from the upper tier take no time.

With look-ahead, blocks that waiting requests need from the lower tier are read into the upper tier
while no other read is waiting, in order of arrival and within a share of the upper tier. They stay
there until their request has used them, and the upper tier's blocks that the next requests need are
evicted last, up to half of the tier (decision 0091 describes the same rules for a server).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice

from policies.simulation.simulator import FlopModel, Infos, Result, SimTier, TraceClock
from policies.simulation.trace import Request, Trace

BATCH = 16
"""Blocks that are read in one turn, as in the server's look-ahead."""
WANTED_SHARE = 0.5
"""Share of the upper tier that may be kept for waiting requests."""
WANTED_REQUESTS = 32
"""Number of waiting requests for which the upper tier keeps blocks."""
HEIRS = 8
"""Number of waiting requests that may take over what another has not used of its reads ahead, as in
the server's look-ahead."""
STEP_TOKENS = 2048
"""Prompt tokens that a step computes, as vLLM does by default."""
ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Speeds:
    """The engine's speeds. All but ``in_flight`` and ``rate`` are in tokens per second.

    ``prefill`` is for computing prompts, ``decode`` for each answer, ``read`` for the lower tier,
    shared by all reads. ``in_flight`` requests run at a time. ``rate`` divides the arrival times:
    with 2, requests arrive twice as fast as recorded.
    """

    prefill: float = 10_000.0
    decode: float = 50.0
    read: float = 20_000.0
    in_flight: float = 16.0
    rate: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Speeds:
        """Read ``prefill=8000,read=20000``; missing values keep their defaults. Raises
        ``ValueError`` with all problems."""
        known = {each.name for each in fields(cls)}
        given: dict[str, float] = {}
        problems: list[str] = []
        for pair in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = pair.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if name not in known:
                wanted = ", ".join(sorted(known))
                problems.append(f'"{name}" is unknown; use {wanted}, e.g. prefill=8000,read=20000')
            elif not 0 < number < math.inf or (name == "in_flight" and number % 1):
                kind = "a positive whole number" if name == "in_flight" else "a positive number"
                problems.append(f'{name} must be {kind} (got "{value}")')
            else:
                given[name] = number
        if problems:
            raise ValueError("; ".join(problems))
        return cls(**given)


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request on its way through the engine. ``hits`` of its blocks are not computed.

    ``missing`` are the blocks that it waits for. ``unread`` and ``ahead`` are positions in
    ``blocks``: the blocks that a load still has to read, and the blocks that look-ahead may read.
    """

    request: Request
    blocks: list[int]
    arrived_s: float
    hits: int = 0
    missing: set[int] = field(default_factory=set)
    unread: deque[int] = field(default_factory=deque)
    ahead: deque[int] = field(default_factory=deque)


class _Disk:
    """The reads of the lower tier: one batch at a time, loads first and in turn, then look-ahead in
    order of arrival."""

    def __init__(self) -> None:
        self.is_busy = False
        self._loads: deque[_Prompt] = deque()
        self._ahead: deque[_Prompt] = deque()

    def add(self, prompt: _Prompt) -> None:
        """Add the reads of this request's missing blocks."""
        self._loads.append(prompt)

    def offer_ahead(self, prompt: _Prompt) -> None:
        """Let look-ahead read for this request while no load waits."""
        self._ahead.append(prompt)

    def next_of_loads(self) -> tuple[_Prompt, list[int]] | None:
        """The next batch of a load: its request, and the positions of the blocks."""
        while self._loads:
            prompt = self._loads.popleft()
            batch: list[int] = []
            while prompt.unread and len(batch) < BATCH:
                position = prompt.unread.popleft()
                if prompt.blocks[position] in prompt.missing:  # no other read has brought it
                    batch.append(position)
            if prompt.unread:
                self._loads.append(prompt)
            if batch:
                return prompt, batch
        return None

    def next_ahead(
        self, space_left: int, wanted: Callable[[int], bool]
    ) -> tuple[_Prompt, list[int]] | None:
        """The next blocks to read ahead, at most ``space_left``, of those that are ``wanted``."""
        while self._ahead and space_left > 0:
            prompt = self._ahead[0]
            batch: list[int] = []
            while prompt.ahead and len(batch) < min(space_left, BATCH):
                position = prompt.ahead.popleft()
                if wanted(prompt.blocks[position]):
                    batch.append(position)
            if batch:
                return prompt, batch  # the rest of this request may come next
            self._ahead.popleft()
        return None


class _Engine:
    """The queue, the running requests, the two tiers, and the disk below them."""

    def __init__(
        self,
        upper: SimTier,
        lower: SimTier,
        speeds: Speeds,
        look_ahead: float,
        infos: Infos,
        block_tokens: int,
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.served: list[tuple[_Prompt, float]] = []
        self.ended_s = 0.0
        self.needed = 0
        self.hits_above = 0
        self.read = 0
        self.read_ahead = 0
        self.given_up = 0
        self._speeds = speeds
        self._infos = infos
        self._block_tokens = block_tokens
        self._ahead_max = int(look_ahead * upper.capacity)
        self._clock = TraceClock(upper.policy, lower.policy)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._queue: deque[_Prompt] = deque()
        self._running = 0
        self._loading: list[_Prompt] = []
        self._disk = _Disk()
        self._held: dict[int, _Prompt] = {}  # what was read ahead, and for which request
        self._flying: set[int] = set()
        self._computing_until_s = 0.0
        self._computing_s = 0.0
        # the speed of answers while a prompt is computed: one token per step
        self._speed_beside = min(1.0, speeds.prefill / STEP_TOKENS / speeds.decode)

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def wasted(self) -> int:
        """Blocks that were read ahead and not used."""
        return self.given_up + len(self._held)

    def run(self, trace: Trace, progress: Callable[[int], None] | None) -> None:
        """Serve all requests until the last answer has ended."""
        for index, request in enumerate(trace.requests):
            self._run_until(request.time_s / self._speeds.rate)
            self._arrive(request)
            if progress is not None and index % 256 == 255:
                progress(256)
        self._run_until(math.inf)

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            at_s, _, happen = heapq.heappop(self._events)
            self._clock.advance(at_s)
            happen()
        if end_s < math.inf:
            self._clock.advance(end_s)

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time_s, self._scheduled, happen))

    # -- requests ------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        prompt = _Prompt(request, request.blocks(), self.now_s)
        if self._ahead_max:
            prompt.ahead.extend(self._below(prompt.blocks[: self._leading(prompt.blocks)]))
            self._disk.offer_ahead(prompt)
        self._queue.append(prompt)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._running < self._speeds.in_flight:
            prompt = self._queue.popleft()
            self._running += 1
            prompt.ahead.clear()
            prompt.hits = self._leading(prompt.blocks)
            hit = prompt.blocks[: prompt.hits]
            prompt.unread.extend(self._below(hit))
            prompt.missing.update(prompt.blocks[position] for position in prompt.unread)
            reads = len(prompt.missing)
            prompt.missing |= self._flying.intersection(hit)
            ahead = self._use_held(prompt)
            self.needed += ahead + reads
            self.hits_above += prompt.hits - ahead - reads
            if prompt.missing:
                self._loading.append(prompt)
                self._disk.add(prompt)
            else:
                self._compute(prompt)
        self._start_read()

    def _use_held(self, prompt: _Prompt) -> int:
        """Release what was read ahead for a request that begins. What it does not use stays for one
        of the next requests, or may be evicted. Returns how much of its hit was read ahead."""
        used = self._held.keys() & set(prompt.blocks[: prompt.hits])
        for block in used:
            del self._held[block]
        rest = {block for block in prompt.blocks if self._held.get(block) is prompt}
        for heir in islice(self._queue, HEIRS if rest else 0):
            mine = rest.intersection(heir.blocks)
            self._held.update(dict.fromkeys(mine, heir))
            rest -= mine
        for block in rest:
            del self._held[block]
        self.given_up += len(rest)
        return len(used)

    def _compute(self, prompt: _Prompt) -> None:
        tokens = prompt.request.prompt_tokens - prompt.hits * self._block_tokens
        seconds = max(1, tokens) / self._speeds.prefill
        self._computing_until_s = max(self.now_s, self._computing_until_s) + seconds
        self._computing_s += seconds
        self._at(self._computing_until_s, lambda: self._answer(prompt))

    def _answer(self, prompt: _Prompt) -> None:
        """Handle the first token of a request."""
        self.served.append((prompt, self.now_s - prompt.arrived_s))
        self._store(prompt)
        others = max(0, prompt.request.output_tokens - 1)
        self._generate(others / self._speeds.decode)

    def _generate(self, seconds: float) -> None:
        """End an answer that takes ``seconds`` if no prompt is computed meanwhile."""
        computed_s = self._computed_s()
        busy_s = max(0.0, self._computing_until_s - self.now_s)
        if seconds < busy_s * self._speed_beside:
            after_s = busy_s = seconds / self._speed_beside
        else:
            after_s = seconds + busy_s * (1 - self._speed_beside)

        def end() -> None:
            later_s = self._computed_s() - computed_s - busy_s  # for prompts that came meanwhile
            missing_s = later_s * (1 - self._speed_beside)
            if missing_s > ROUNDING_S:
                self._generate(missing_s)
            else:
                self._end()

        self._at(self.now_s + after_s, end)

    def _computed_s(self) -> float:
        """Seconds in which prompts were computed until now."""
        return self._computing_s - max(0.0, self._computing_until_s - self.now_s)

    def _end(self) -> None:
        self.ended_s = self.now_s
        self._running -= 1
        self._admit()

    # -- tiers ---------------------------------------------------------------------------------

    def _leading(self, blocks: Sequence[int]) -> int:
        above, below = self.upper.resident, self.lower.resident
        for count, block in enumerate(blocks):
            if block not in above and block not in below:
                return count
        return len(blocks)

    def _below(self, blocks: Sequence[int]) -> list[int]:
        """The positions of the blocks that are not in the upper tier."""
        above = self.upper.resident
        return [position for position, block in enumerate(blocks) if block not in above]

    def _store(self, prompt: _Prompt) -> None:
        blocks, request = prompt.blocks, prompt.request
        known = self._infos.ended(request)
        for tier, kept in ((self.upper, self._kept(prompt)), (self.lower, set(blocks))):
            depths = [d for d, block in enumerate(blocks) if block not in tier.resident]
            infos = [self._infos.stored(request, d) for d in depths]
            tier.store([blocks[d] for d in depths], infos, kept)
            tier.touch(blocks)
            if known:
                tier.advise(blocks, known)

    def _kept(self, prompt: _Prompt) -> set[int]:
        """The blocks that the upper tier must not evict now."""
        kept = {*self._held, *prompt.blocks}
        if self._ahead_max:
            space_left, above = int(WANTED_SHARE * self.upper.capacity), self.upper.resident
            for waiting in islice(self._queue, WANTED_REQUESTS):
                wanted = {block for block in waiting.blocks if block in above} - kept
                space_left -= len(wanted)
                if space_left < 0:
                    break
                kept |= wanted
        return kept

    # -- reads ---------------------------------------------------------------------------------

    def _start_read(self) -> None:
        if self._disk.is_busy:
            return
        load = self._disk.next_of_loads()
        if load is not None:
            self._read(*load)
            return
        space_left = self._ahead_max - len(self._held)
        ahead = self._disk.next_ahead(space_left, self._is_only_below)
        if ahead is not None:
            self._read_ahead(*ahead)

    def _is_only_below(self, block: int) -> bool:
        return block in self.lower.resident and block not in self.upper.resident

    def _read_ahead(self, prompt: _Prompt, positions: list[int]) -> None:
        """Reserve space in the upper tier, and read what fits."""
        fits = self._promote(prompt, positions)
        prompt.ahead.extendleft(reversed(positions[fits:]))
        if fits:
            self._flying = {prompt.blocks[position] for position in positions[:fits]}
            self._held.update(dict.fromkeys(self._flying, prompt))
            self.read_ahead += fits
            self._read(prompt, positions[:fits])

    def _read(self, prompt: _Prompt, positions: list[int]) -> None:
        self._disk.is_busy = True
        seconds = len(positions) * self._block_tokens / self._speeds.read
        self._at(self.now_s + seconds, lambda: self._end_read(prompt, positions))

    def _end_read(self, prompt: _Prompt, positions: list[int]) -> None:
        self._disk.is_busy = False
        self.read += len(positions)
        if self._flying:
            self._flying = set()
        else:
            self._promote(prompt, positions)
        blocks = [prompt.blocks[position] for position in positions]
        for waiting in self._loading[:]:
            waiting.missing.difference_update(blocks)
            if not waiting.missing:
                self._loading.remove(waiting)
                self._compute(waiting)
        self._start_read()

    def _promote(self, prompt: _Prompt, positions: list[int]) -> int:
        """Insert blocks of the lower tier into the upper one, as far as there is space. Returns the
        number of those that fit."""
        above = self.upper.resident
        fresh = [position for position in positions if prompt.blocks[position] not in above]
        blocks = [prompt.blocks[position] for position in fresh]
        infos = [self._infos.stored(prompt.request, position) for position in fresh]
        return self.upper.store(blocks, infos, self._kept(prompt))


def simulate_timed(
    trace: Trace,
    upper: SimTier,
    lower: SimTier,
    speeds: Speeds,
    *,
    look_ahead: float = 0.0,
    name: str = "",
    hints: str = "none",
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Run a trace at its arrival times. ``look_ahead`` is a share of the upper tier, 0 for none.

    The result's ``extra`` has the share of prompt tokens that the upper tier had when their request
    began, without blocks that were read ahead and not yet used. It also has the mean and the 99th
    percentile of the time to the first token and the end of the last answer (seconds), the blocks
    read from the lower tier per block needed from it (0 if none was needed), the number of blocks
    read ahead, and the number of those that were not used.
    """
    model = FlopModel()
    result = Result(trace.name, name, upper.capacity, trace.block_tokens)
    infos = Infos(trace.block_tokens, model, hints)
    engine = _Engine(upper, lower, speeds, look_ahead, infos, trace.block_tokens)
    engine.run(trace, progress)
    for prompt, _ in engine.served:
        result.count(prompt.request, prompt.hits, model)
    result.count_work(upper, lower)
    waits = sorted(seconds for _, seconds in engine.served)
    tokens_above = engine.hits_above * trace.block_tokens
    result.note(
        look_ahead=look_ahead,
        upper_hit_ratio=tokens_above / result.prompt_tokens if result.prompt_tokens else 0.0,
        ttft_mean_s=sum(waits) / len(waits) if waits else 0.0,
        ttft_p99_s=waits[math.ceil(0.99 * len(waits)) - 1] if waits else 0.0,
        total_s=engine.ended_s,
        read_per_needed=engine.read / engine.needed if engine.needed else 0.0,
        read_ahead_blocks=engine.read_ahead,
        wasted_blocks=engine.wasted,
    )
    return result

"""Requests that wait for reads ahead before vLLM gives them GPU blocks.

A request whose prefix lies in lower tiers can begin its load at once: it then holds GPU blocks
while the disk reads. Or it can wait until look-ahead has read the prefix into the CPU tier; vLLM
then schedules the requests behind it. ``decide`` chooses from measured values; ``ReadWaits``
collects them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from offload.layout.keys import CPU
from offload.planner.context import PlannerContext
from offload.planner.load_or_recompute import ShortenReason
from offload.planner.load_sources import LoadSources
from offload.planner.look_ahead.look_ahead import LookAhead
from offload.planner.step_budget import READ_WAIT_REQUESTS_MAX

AUTO, ALWAYS, NEVER = "auto", "always", "never"
WORTH_S, WORTH_STEPS = 0.1, 8
"""A request does not wait for reads that take less than this many seconds or steps: with a wait, it
begins about two steps later than with a load."""
TOTAL_S = 60.0
"""Longest wait of a request; most of it is spent behind the reads of earlier requests."""
STUCK_ASKS = 3
"""A wait ends when vLLM has asked this many times in a row while nothing was being read ahead."""


class Action(Enum):
    """The next action of a request that vLLM could run.

    ``BEGIN``: it loads its whole hit. ``WAIT``: it waits for its reads. ``COMPUTE`` and ``LATE``:
    it loads the chunks in the CPU tier and computes the rest, because computing is faster, or
    because the reads took too long. ``shorten_reason`` says why it loads less than its whole hit.
    """

    BEGIN = "begin"
    WAIT = "wait"
    COMPUTE = "compute", ShortenReason.QUEUE
    LATE = "late", ShortenReason.LATE

    def __init__(self, _name: str, shorten_reason: ShortenReason = ShortenReason.NOTHING) -> None:
        self.shorten_reason = shorten_reason


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """The number of ``free`` GPU blocks, the number that the request has to get (``needed``), and
    the number of other requests that are ``waiting`` for blocks."""

    free: int
    needed: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ReadEstimate:
    """The facts about the reads of a request.

    * ``is_read``: they have ended, or nearly. ``is_stuck``: they make no progress.
    * ``waited_s``: the time for which the request has waited. ``reading_s`` is the part of this
      time since the first read of the request's chunks began; it is limited to ``limit_s``.
    * ``is_queued``: earlier requests wait for their reads.
    * ``read_s``: the expected time of all reads up to the request's own. ``compute_s``: the
      expected time of computing instead. ``None``: not measured, or not needed.
    * ``waiting``: the number of requests that already wait for their reads.
    * ``worth_s``: requests do not wait for reads that take less time.
    * ``others``: the number of other requests that could use GPU blocks at once. Each is assumed to
      need as many blocks as this one.
    """

    is_read: bool
    is_stuck: bool
    waited_s: float
    reading_s: float
    limit_s: float
    is_queued: bool
    read_s: float | None
    compute_s: float | None
    waiting: int
    worth_s: float
    free_blocks: int
    needed_blocks: int
    others: int

    @property
    def is_scarce(self) -> bool:
        """True if others could use the blocks that the request would hold."""
        return self.others > 0 and self.free_blocks < self.needed_blocks * (1 + self.others)

    @property
    def should_compute(self) -> bool:
        """True if computing saves the request more time than it costs the requests that already
        wait.

        If blocks are scarce, the waiting requests cannot run while this one is computed.
        """
        if self.read_s is None or self.compute_s is None:
            return False
        delayed = self.waiting if self.is_scarce else 0
        return self.read_s > self.compute_s * (1 + delayed)


def decide(choice: str, estimate: ReadEstimate) -> Action:
    """Choose what the request does now."""
    if estimate.is_read or estimate.is_stuck or estimate.waited_s >= TOTAL_S:
        return Action.BEGIN
    if estimate.reading_s >= estimate.limit_s:
        return Action.LATE
    if choice == ALWAYS:
        return Action.WAIT
    if estimate.read_s is None:
        return Action.BEGIN  # the speed is unknown, and this load measures it
    if estimate.is_queued and estimate.should_compute:
        return Action.COMPUTE
    is_better = estimate.is_queued or estimate.is_scarce
    return Action.WAIT if is_better and estimate.read_s >= estimate.worth_s else Action.BEGIN


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait that began at ``since`` for ``tokens`` of lower tiers, most of them in ``tier``. Their
    reads were expected to take ``read_s``, including the reads before them. ``begun`` is the number
    of reads that look-ahead had begun when vLLM last asked. ``idle`` counts how often in a row vLLM
    has asked while look-ahead made no progress."""

    since: float
    tier: int
    tokens: int
    read_s: float | None
    begun: int = 0
    idle: int = 0


class ReadWaits:
    """The requests that wait for their reads. Owned by the planner; used on its thread. ``count``
    requests have waited, for ``seconds`` in total.
    """

    def __init__(
        self,
        context: PlannerContext,
        sources: LoadSources,
        look_ahead: LookAhead,
        choice: str,
    ) -> None:
        self.count = 0
        self.seconds = 0.0
        self._health = context.health
        self._budget = context.budget
        self._sources = sources
        self._ahead = look_ahead
        self._choice = choice
        self._waits: dict[str, _Wait] = {}  # oldest first
        self._ended: dict[str, tuple[Action, float]] = {}  # final actions, and seconds waited

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._waits)

    @property
    def is_on(self) -> bool:
        """True if requests may wait for reads."""
        return self._choice != NEVER and self._ahead.is_on

    def decide(
        self, request: str, now: float, blocks: BlockDemand, computing: Callable[[], int]
    ) -> Action:
        """Decide what a request does that vLLM could run now. Every action but ``WAIT`` is final.

        ``computing`` counts the tokens that vLLM computes for others first.
        """
        if (ended := self._ended.get(request)) is not None:
            return ended[0]
        wait = self._waits.get(request) or self._expect(request, now)
        action = Action.BEGIN
        if wait is not None:
            estimate = self._estimate(request, wait, now, blocks, computing)
            action = decide(self._choice, estimate)
        if action is not Action.WAIT:
            self._end(request, action, now)
        elif request not in self._waits:
            self._waits[request] = wait  # type: ignore[assignment]  # only such requests wait
            self.count += 1
        return action

    def _expect(self, request: str, now: float) -> _Wait | None:
        """The wait that the request may begin; ``None`` if it has nothing to wait for, or must not
        wait."""
        batches = self._ahead.batches(request)
        if not batches or len(self._waits) >= READ_WAIT_REQUESTS_MAX:
            return None
        tokens = self._sources.expected(batches, batches[0].origin.controls.read)
        tokens.pop(CPU, None)
        if not tokens or not all(self._health[tier].readable for tier in tokens):
            return None  # no request waits for a tier that is slower than computing
        tier = max(tokens, key=tokens.__getitem__)
        break_even, total = self._health[tier].break_even, sum(tokens.values())
        before = sum(wait.tokens for wait in self._waits.values()) + break_even.reads.tokens
        read_s = None if break_even.speed is None else (before + total) / break_even.speed
        return _Wait(now, tier, total, read_s, self._ahead.reads_begun)

    def _estimate(
        self,
        request: str,
        wait: _Wait,
        now: float,
        blocks: BlockDemand,
        computing: Callable[[], int],
    ) -> ReadEstimate:
        ahead, break_even = self._ahead, self._health[wait.tier].break_even
        progress, begun = ahead.progress(request), ahead.reads_begun
        wait.idle = 0 if ahead.is_reading or begun > wait.begun else wait.idle + 1
        wait.begun = begun
        since = now if progress is None or progress.since is None else progress.since
        is_first_ask, compute_s, others = request not in self._waits, None, blocks.waiting
        if is_first_ask and self._choice == AUTO:
            compute_s = break_even.compute_s(wait.tokens, computing())
        if not break_even.is_compared:  # requests that wait for reads will not compute instead
            others -= ahead.others_unread(request)
        return ReadEstimate(
            is_read=progress is None or progress.is_read,
            is_stuck=wait.idle > STUCK_ASKS or not self._health[wait.tier].readable,
            waited_s=now - wait.since,
            reading_s=now - max(since, wait.since),
            limit_s=break_even.timeout_s,
            is_queued=next(iter(self._waits), request) != request,
            read_s=wait.read_s,
            compute_s=compute_s,
            waiting=len(self._waits),
            worth_s=max(WORTH_S, WORTH_STEPS * self._budget.step_s),
            free_blocks=blocks.free,
            needed_blocks=blocks.needed,
            others=others,
        )

    def _end(self, request: str, action: Action, now: float) -> None:
        wait = self._waits.pop(request, None)
        waited_s = 0.0 if wait is None else now - wait.since
        self.seconds += waited_s
        self._ended[request] = action, waited_s

    def exempt(self, request: str) -> None:
        """Let this request run without a wait: it was preempted, and has waited already."""
        self._ended[request] = Action.BEGIN, 0.0

    def waited_s(self, request: str) -> float:
        """The seconds that a request has waited, if its wait has ended; otherwise 0."""
        return self._ended.get(request, (Action.BEGIN, 0.0))[1]

    def leave(self, request: str, now: float) -> None:
        """Forget a request that runs, loads or has ended."""
        if request in self._waits:
            self._end(request, Action.BEGIN, now)
        self._ended.pop(request, None)

    def totals(self) -> dict[str, float]:
        """The number of waits and their time, by flat name."""
        return {"read_waits": self.count, "read_wait_seconds": self.seconds}

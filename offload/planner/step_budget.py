"""Bounds the planner's work in one step of vLLM: one budget, its allowances, and all their numbers.

The parts of the planner draw from one ``StepBudget``. Work late in a chunk's life has priority:
processing ended jobs may use most of the budget, stores less, and earlier stages even less. So
under overload the end of the pipeline keeps up, and stores wait. Stores are requested again later,
and a store that is never made costs nothing. Some kinds of work also have an ``Allowance``, a
number of chunks per step.

The table below lists all bounds per step of the planner, the lookups and the scheduler side. Owned
by the planner; used on vLLM's scheduler thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import sub

# -- costs: units of about a microsecond per chunk, measured with a million keys in the lower tier,
# -- whose dicts do not fit into CPU caches (``python -m bench hooks``)

STORE_COST = EVICT_COST = TAKE_IN_COST = AHEAD_COST = 1
TOUCH_COST = WRITE_THROUGH_COST = WRITTEN_THROUGH_COST = 2
LOOKUP_COST = 6 / 10
KEY_COST = 1 / 10
UNITS_PER_CHUNK = 3
"""Budget of a step in units per chunk that the step may load. Loading that many chunks uses half of
the budget."""

# -- loads, in chunks that are in the CPU tier

STEP_CHUNKS = 256
"""Number of chunks that a short step may load. A chunk that gets a slot counts twice."""
EVICT_COST_IN_LOADED_CHUNKS = 2
"""Cost of evicting a chunk to make space, in loaded chunks."""
ACCEPT_COST_IN_LOADED_CHUNKS = 1 / 16
"""Cost of accepting a chunk of a long load that is planned later."""
LOAD_PART_MAX = 64
"""Number of chunks that are planned at a time; their cost is known only afterwards."""
PROBE_CHUNKS = 64
"""Number of chunks that a probe of a tier reads."""
PIECES = 2
"""When a load of as many chunks as a step may load has ended, its chunks are processed in this many
pieces."""

# -- waiting requests, in chunks unless stated otherwise

MATCHED_REQUESTS_MAX = 64
"""Number of requests that are matched in a step, so that look-ahead knows their chunks."""
MATCHED_AGAIN_REQUESTS_MAX = 2
"""Number of requests at the front of the queue that are matched again, once."""
READ_WAIT_REQUESTS_MAX = 64
"""Number of requests that wait for their reads: vLLM asks for each of them in every step."""
AHEAD_LOOK_MAX = 128
"""Number of chunks of waiting requests that look-ahead looks up in a step."""
AHEAD_OPEN_REQUESTS_MAX = 64
"""Number of waiting requests of each of four kinds that look-ahead reads for in a step."""
AHEAD_WANTED_REQUESTS_MAX = 2
"""Number of requests whose chunks become wanted at a time: a long prompt has thousands."""
AHEAD_HEIRS_MAX = 8
"""Number of next requests that may take over what was read for one that has left."""

# -- lookups, keys and stores, in chunks

LOOKUP_CHUNKS = 768
"""Number of chunks that the lookups of a short step may query: about half a millisecond."""
LOOKUP_CHUNKS_MIN = 256
"""Number of chunks that each lookup may query even when other lookups have used up the
allowance."""
ENDED_KEYS_MAX = 1024
"""Number of keys made in one step for requests that have ended: a tenth of a millisecond. Usually
their lookups, loads and stores have already made all of them."""
STORE_CHUNKS_MIN = 64
"""Number of chunks that may be stored even when the budget is spent: for each request that ends,
because its last chunks cannot be stored later, and for all running requests together."""
STORE_PIECE_MIN, STORE_PIECE_MAX = 16, STEP_CHUNKS // PIECES
"""Minimum and maximum number of chunks of a store to plan at a time. Smaller pieces would cost more
than planning some chunks twice; with larger pieces, some lookups would be wasted."""
LOOK_AGAIN_MAX = LOOK_AT_END_MAX = 1024
"""Maximum number of an ended request's chunks that a step looks up again (``LOOK_AGAIN_MAX``), and
for the first time (``LOOK_AT_END_MAX``)."""

# -- other work, in chunks unless stated otherwise

USE_KEYS_MAX = 128
"""Number of keys whose use is reported to a policy at a time."""
WRITTEN_JOBS_MAX = 8
"""Number of write-through jobs of a tier that are processed together, which is cheaper than one by
one."""
EVICTED_WRITES_MAX = 256
"""Number of queued but evicted chunks that a write-through queue skips."""
EVENT_CHANGES_MAX = 4096
EVENT_FOUND_MAX = 1024
"""Number of chunks in one step's KV events, including chunks found at the start. A thousand cost a
millisecond or more."""
DELETIONS_MAX = 1024
"""Number of deletions sent to one tier: a tier that has lost everything has millions."""
EXPIRED_MAX = 4096
"""Number of expired entries dropped by the presence cache, and by the timed pins."""

# -- shares of the budget that one kind of work leaves to others

LEFT_BY_RESULTS_SHARE = 5 / 8
LEFT_BY_STORES_SHARE = LEFT_BY_AHEAD_SHARE = 3 / 8
LEFT_TO_WRITE_THROUGH_SHARE = 2 / 8
OVERDUE_SHARE = 1 / 16
"""Share of the backlog that every step processes, even if the budget is spent: until then, its
chunks keep their slots and cannot be hit."""

# -- long steps

LONG_S = 0.025
"""A step that is n times this long may do n times as much work, which takes about a twentieth of
the step's time. Otherwise a load that is planned over a hundred long steps would take longer than
computing its prompt, and fewer of the chunks that long steps compute would be stored."""
TIMES_MAX = 8
STEPS = 4
"""Number of consecutive steps that must be this long, so that an idle server does not look like one
with long steps."""


class Allowance:
    """Limits the number of chunks that one kind of work handles in a step. Owned by the
    ``StepBudget``.

    ``chunks`` is the allowance of a short step, ``left`` is what is left of it in the current step.
    ``chunks_min`` chunks may be handled at a time even when nothing is left. A chunk costs ``cost``
    units of the budget, a whole number of tenths, which are given to ``spend``.
    """

    __slots__ = ("_cost_tenths", "_scales", "_spend", "_tenths", "chunks", "chunks_min", "left")

    def __init__(
        self,
        chunks: int,
        *,
        chunks_min: int = 0,
        scales: bool = False,
        cost: float = 0,
        spend: Callable[[int], None] | None = None,
    ) -> None:
        self.chunks = self.left = chunks
        self.chunks_min = chunks_min
        self._scales = scales
        self._cost_tenths = round(10 * cost)  # whole numbers, so that sums are exact
        self._spend = spend
        self._tenths = 0  # taken but not yet charged to the budget

    def take(self, chunks: int) -> None:
        """Record that ``chunks`` were handled, even if this exceeds the allowance, and charge them
        to the budget."""
        self.left -= chunks
        if self._spend is not None:
            units, self._tenths = divmod(self._tenths + self._cost_tenths * chunks, 10)
            self._spend(units)

    def renew(self, times: int = 1) -> None:
        """Begin the next step, which may do ``times`` as much work as a short one."""
        self.left = self.chunks * (times if self._scales else 1)


class StepBudget:
    """The budget of a step and its allowances.

    A short step has ``units``, a long one ``times`` as many; ``left`` is the rest of the current
    step's budget. The allowances: ``loads`` counts chunks in the CPU tier, ``lookups`` the chunks
    that are queried, ``ahead`` those that look-ahead looks up, ``keys`` the keys made for requests
    that have ended, and ``stores`` the chunks that running requests may store even when the budget
    is spent. ``piece_chunks`` chunks of an ended load are processed at a time. ``step_s`` is the
    duration of the shortest of the last ``STEPS`` steps; 0 until there were that many.
    """

    def __init__(self, step_chunks: int) -> None:
        self.units = self.left = UNITS_PER_CHUNK * step_chunks
        self.piece_chunks = max(1, step_chunks // PIECES)
        self.times = 1
        self.step_s = 0.0
        self.loads = Allowance(step_chunks, scales=True)
        self.lookups = Allowance(
            LOOKUP_CHUNKS,
            chunks_min=LOOKUP_CHUNKS_MIN,
            scales=True,
            cost=LOOKUP_COST,
            spend=self.spend,
        )
        self.ahead = Allowance(AHEAD_LOOK_MAX, cost=AHEAD_COST, spend=self.spend)
        self.keys = Allowance(ENDED_KEYS_MAX, cost=KEY_COST, spend=self.spend)
        self.stores = Allowance(STORE_CHUNKS_MIN)
        self._ends: deque[float] = deque(maxlen=STEPS + 1)

    def above(self, share: float) -> int:
        """The part of the budget that may be spent if this share is left for other work."""
        return self.left - int(self.times * self.units * share)

    def store_look_max(self, *, ended: bool) -> int:
        """The maximum number of one request's chunks in one group that may be looked up for the
        first time in this step, to find those that must be stored."""
        return LOOK_AT_END_MAX if ended else STEP_CHUNKS * self.times

    def spend(self, units: int) -> None:
        """Record work, even if it exceeds what was left."""
        self.left -= units

    def end_step(self, now: float, *, half: bool = False) -> None:
        """Begin the next step (monotonic seconds); ``half`` of its budget is reserved."""
        ends = self._ends
        ends.append(now)
        self.step_s = min(map(sub, islice(ends, 1, None), ends)) if len(ends) > STEPS else 0.0
        self.times = max(1, min(TIMES_MAX, int(self.step_s / LONG_S)))
        self.left = self.times * self.units // (2 if half else 1)
        for allowance in (self.loads, self.lookups, self.ahead, self.keys, self.stores):
            allowance.renew(self.times)


class DeferredWork:
    """Queues the work that remains when jobs have ended, in pieces. Owned by the planner.

    Several jobs with thousands of chunks may end between two steps; the states of their chunks then
    change over several steps. A step does as many pieces as its budget allows, but at least one,
    and at least a sixteenth of the backlog at its beginning. ``pieces`` are those that are left.
    """

    def __init__(self, budget: StepBudget) -> None:
        self.pieces: deque[tuple[int, Callable[[], None]]] = deque()
        self._budget = budget
        self._has_worked = False
        self._behind = 0  # the total cost of all pieces
        self._overdue = 0  # the part of this cost that must be worked off in this step

    def add(self, cost: int, work: Callable[[], None]) -> None:
        """Add a piece and its cost in units of the budget."""
        self.pieces.append((max(1, cost), work))
        self._behind += max(1, cost)

    def work(self, leave: float = LEFT_BY_RESULTS_SHARE) -> list[Exception]:
        """Do the pieces that the step still allows; return the errors of failed pieces."""
        errors: list[Exception] = []
        while self.pieces and (
            self._budget.above(leave) > 0 or not self._has_worked or self._overdue > 0
        ):
            cost, work = self.pieces.popleft()
            self._behind -= cost
            self._overdue -= cost
            self._budget.spend(cost)
            self._has_worked = True
            try:
                work()
            except Exception as error:  # a failing piece must not affect the others
                errors.append(error)
        return errors

    def end_step(self, leave: float) -> list[Exception]:
        """Do ``work`` once more, at the end of the step."""
        errors = self.work(leave) if self.pieces else []
        self._has_worked = False
        self._overdue = int(self._behind * OVERDUE_SHARE)
        return errors

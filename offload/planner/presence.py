"""Queries shared tiers about their chunks, and caches their replies.

Other engines write to a shared tier, so this engine's index of it is incomplete: it contains the
chunks that the tier reported, or that this engine wrote, in the last ``remember_s`` seconds. Absent
chunks are remembered for the same time. Queries travel with a step's plan and replies with a
report, so no call in this module waits. The numbers of open queries and of remembered chunks are
bounded. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload.index.chunk_batch import GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_of
from offload.messages.plan import PresenceQuery
from offload.messages.report import PresenceReply, merged_answer
from offload.planner.context import PlannerContext
from offload.planner.step_budget import EXPIRED_MAX
from policies.base import EntryInfo

KNOWN_CHUNKS_MAX = 262_144
"""Maximum number of chunks of one tier that are remembered as present; the same maximum applies to
chunks remembered as absent."""
STEPS_MIN = 3
"""Number of steps that a reply takes in an engine that computes other requests meanwhile."""
ANSWER_MAX_S = 30.0
"""Time after which a query without a reply is dropped."""
PROBE_KEY = b"kvtiers-probe"


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Bounds of queries: how long a request waits for a reply, how long replies are remembered
    (both in seconds), and how many chunks of one tier may be queried at a time."""

    lookup_timeout_s: float = 0.05
    remember_s: float = 5.0
    asked_max: int = 65_536


@dataclass(slots=True)
class PendingLookup:
    """The queries that a request waits for, the time and step in which they were sent, and whether
    the request has continued since then."""

    numbers: frozenset[int]
    since: float
    step: int
    is_over: bool = False


@dataclass(slots=True)
class _Open:
    """A query that at least one rank has not answered yet."""

    query: PresenceQuery
    since: float
    is_probe: bool = False
    answer: PresenceReply | None = None


class _Memory:
    """The cached replies of one shared tier.

    Three dicts map chunks to their expiry, oldest first: chunks that are ``absent``, ``there``, or
    unknown because the tier failed to reply (``silent``).
    """

    def __init__(self, tier: int, index: TierIndex, groups: Mapping[int, GroupInfo]) -> None:
        self.index = index
        self.asked: dict[bytes, int] = {}
        self.absent: dict[bytes, float] = {}
        self.there: dict[bytes, float] = {}
        self.silent: dict[bytes, float] = {}
        self.asked_chunks = self.found_chunks = self.unanswered = 0
        self._infos = {
            group: EntryInfo(group, info.kind, 0, info.footprints[tier])
            for group, info in groups.items()
        }

    def unknown(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys of unknown state that are in no open query."""
        resident, absent, asked = self.index.resident, self.absent, self.asked
        return [k for k in keys if not (k in resident or k in absent or k in asked)]

    def found(self, keys: Sequence[bytes], until: float) -> None:
        """Record that the tier holds these chunks (in prefix order)."""
        index = self.index
        fresh = [key for key in reversed(keys) if index.is_absent(key)]
        infos = [self._infos[group_of(key)] for key in fresh]
        short = index.space.missing(sum(info.size_bytes for info in infos))
        if short:
            index.evict(short)
        index.recover(fresh, infos)
        self.remember([key for key in keys if key in index], until)

    def remember(self, keys: Iterable[bytes], until: float) -> None:
        """Remember these chunks, which are in the index, as present."""
        for key in keys:
            self.absent.pop(key, None)
            self.there.pop(key, None)
            self.there[key] = until

    def missed(self, keys: Iterable[bytes], until: float) -> None:
        """Record that the tier does not hold these chunks, except for chunks written since the
        query."""
        for key in keys:
            if key not in self.index:
                self.absent.pop(key, None)
                self.absent[key] = until

    def tick(self, now: float, remember_s: float) -> None:
        """Drop expired entries, and the oldest entries if there are too many."""
        for known in (self.absent, self.silent):
            for _ in _due(known, now):
                pass
        due = list(_due(self.there, now))
        in_use = [key for key in due if self.index.is_in_use(key)]
        self.index.drop(set(due).difference(in_use))
        for key in in_use:
            self.there[key] = now + remember_s

    def clear(self) -> None:
        """Forget everything."""
        for known in (self.asked, self.absent, self.there, self.silent):
            known.clear()


class PresenceCache:
    """Caches the known content of the shared tiers. Owned by the planner; used on its
    thread.

    ``tiers`` are the numbers of the shared tiers; ``steps`` counts plans, ``timeouts`` counts
    requests that continued without a reply.
    """

    def __init__(self, context: PlannerContext, limits: SharedLimits) -> None:
        self.tiers = context.shared
        self.limits = limits
        self.steps = 0
        self.timeouts = 0
        self._health = context.health
        self._ranks = context.ranks
        self._memories = {
            tier: _Memory(tier, context.lower[tier], context.groups) for tier in sorted(self.tiers)
        }
        self._planned: list[PresenceQuery] = []
        self._open: dict[int, _Open] = {}
        self._closed: set[int] = set()
        self._next = 1

    def __len__(self) -> int:
        """Open queries."""
        return len(self._open)

    # -- a request ---------------------------------------------------------------------------

    def query(
        self, keys: Sequence[bytes], read: frozenset[int] | None, now: float
    ) -> PendingLookup:
        """Query every readable shared tier among ``read`` (``None``: all) for these keys. Skips
        keys whose state is known or that are in an open query. The number of keys is bounded."""
        numbers: set[int] = set()
        for tier, memory in self._memories.items():
            if tier in self._closed or not self._health[tier].readable:
                continue
            if read is not None and tier not in read:
                continue
            numbers.update(number for key in keys if (number := memory.asked.get(key)))
            left = max(0, self.limits.asked_max - len(memory.asked))
            unknown = memory.unknown(keys)[:left]
            if unknown:
                number = self._send(tier, tuple(unknown), now)
                memory.asked.update(dict.fromkeys(unknown, number))
                memory.asked_chunks += len(unknown)
                numbers.add(number)
        return PendingLookup(frozenset(numbers), now, self.steps)

    def check_wait(self, wait: PendingLookup, now: float) -> bool:
        """Return whether the request goes on waiting. The wait ends when its queries have ended, or
        when it has lasted too long."""
        if wait.is_over:
            return False
        if self.may_be_answered(wait, now):
            return True
        self.timeouts += not self._open.keys().isdisjoint(wait.numbers)
        wait.is_over = True
        return False

    def may_be_answered(self, wait: PendingLookup, now: float) -> bool:
        """True if a reply to one of these queries may still come in time."""
        if self._open.keys().isdisjoint(wait.numbers):
            return False
        deadline = wait.since + self.limits.lookup_timeout_s
        return now < deadline or self.steps < wait.step + STEPS_MIN

    def is_stale(self, wait: PendingLookup, now: float) -> bool:
        """True if the request must query again because replies may have expired.

        This is never true before the request has continued once: otherwise a request in an engine
        with long steps would wait forever.
        """
        return wait.is_over and now > wait.since + self.limits.remember_s

    def is_unanswered(self, tier: int, key: bytes) -> bool:
        """True if the tier was queried for this chunk and has not replied yet, or could not
        reply."""
        memory = self._memories.get(tier)
        return memory is not None and (key in memory.asked or key in memory.silent)

    # -- a step ------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Set the time: drop queries without a reply, and expired entries."""
        for number, asked in list(self._open.items()):
            if now < asked.since + ANSWER_MAX_S:
                break  # queries are in the order in which they were sent
            self._close(number, now)
        for memory in self._memories.values():
            memory.tick(now, self.limits.remember_s)

    def take(self) -> tuple[PresenceQuery, ...]:
        """The queries of this step."""
        self.steps += 1
        planned, self._planned = tuple(self._planned), []
        return planned

    def answered(self, answers: Mapping[int, PresenceReply], now: float) -> None:
        """Process the ranks' replies; a late reply is remembered like any other."""
        for number, answer in answers.items():
            asked = self._open.get(number)
            if asked is not None:
                asked.answer = merged_answer(asked.answer, answer)
                if asked.answer.ranks >= self._ranks:
                    self._close(number, now)

    def plan_probe(self, tier: int, now: float) -> int:
        """Query an unavailable tier without a request, to test whether it replies."""
        number = self._send(tier, (PROBE_KEY,), now)
        self._open[number].is_probe = True
        return number

    # -- knowledge from other sources -------------------------------------------------------------

    def written(self, tier: int, keys: Sequence[bytes], now: float) -> None:
        """Record chunks that were written to a shared tier and entered into its index."""
        self._memories[tier].remember(keys, now + self.limits.remember_s)

    def forget_all(self) -> None:
        """Forget everything and drop open queries, because the weights have changed. Tiers are
        queried again only after ``begin_epochs``."""
        for asked in self._open.values():
            if asked.is_probe:
                self._health[asked.query.tier].drop_probe()
        self._open.clear()
        self._planned.clear()
        for memory in self._memories.values():
            memory.clear()
        self._closed = set(self.tiers)

    def begin_epochs(self, tiers: Iterable[int]) -> None:
        """Record that the workers get the new epochs of these tiers before any further query."""
        self._closed.difference_update(tiers)

    def totals(self) -> dict[str, float]:
        """Counters by flat name; those of a tier end in ``:`` and its name."""
        found: dict[str, float] = {}
        for memory in self._memories.values():
            name = memory.index.name
            found[f"asked_chunks:{name}"] = memory.asked_chunks
            found[f"found_chunks:{name}"] = memory.found_chunks
            found[f"unanswered_questions:{name}"] = memory.unanswered
        return found | ({"lookup_timeouts": self.timeouts} if self.tiers else {})

    # -- inside ------------------------------------------------------------------------------

    def _send(self, tier: int, keys: Sequence[bytes], now: float) -> int:
        number = self._next
        self._next += 1
        query = PresenceQuery(number, tier, keys)
        self._planned.append(query)
        self._open[number] = _Open(query, now)
        return number

    def _close(self, number: int, now: float) -> None:
        asked = self._open.pop(number)
        query, present = asked.query, asked.answer.present if asked.answer else None
        if asked.is_probe:
            self._health[query.tier].probe_answered(now, good=present is not None)
            return
        memory = self._memories[query.tier]
        for key in query.keys:
            memory.asked.pop(key, None)
            memory.silent.pop(key, None)
        until = now + self.limits.remember_s
        if present is None:
            memory.unanswered += 1
            memory.silent.update(dict.fromkeys(query.keys, until))
            return
        there = [key for key, is_there in zip(query.keys, present, strict=True) if is_there]
        memory.found_chunks += len(there)
        memory.found(there, until)
        missing = [key for key, is_there in zip(query.keys, present, strict=True) if not is_there]
        memory.missed(missing, until)


def _due(known: dict[bytes, float], now: float) -> Iterable[bytes]:
    """Remove expired entries, and the oldest entries while there are too many; yield their keys.
    Stops after ``EXPIRED_MAX`` entries."""
    taken = 0
    while known and taken < EXPIRED_MAX:
        key, until = next(iter(known.items()))
        if until > now and len(known) <= KNOWN_CHUNKS_MAX:
            return
        del known[key]
        taken += 1
        yield key

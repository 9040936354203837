"""Generates a trace from a request mix: conversations of one shape, for planning without a recorded
trace.

    users=200,turns=6,system=1000,prompt=300,answer=400,gap=90,hours=4

For ``hours`` hours, new conversations start at a rate that keeps about ``users`` of them active.
Each has ``turns`` turns, ``gap`` seconds apart on average. Every prompt consists of a ``system``
prompt that all conversations share, and the conversation so far: ``prompt`` new tokens per turn and
the ``answer`` tokens of earlier turns. Gaps and arrivals are exponentially distributed, with a
fixed seed: the same mix gives the same trace.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields

from policies.simulation.trace import Request, Trace

REQUESTS_MAX = 2_000_000
TURNS_MAX = 10_000
TOKENS_MAX = 100_000_000
"""Limits the length of a prompt, because each of its blocks takes memory during the simulation."""
_PART = re.compile(r"([a-z]+)=([0-9]+(?:\.[0-9]+)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Mix:
    """See the module's docstring. Lengths are in tokens, times in seconds."""

    users: int = 100
    turns: int = 5
    system: int = 1000
    prompt: int = 300
    answer: int = 300
    gap: float = 60.0
    hours: float = 4.0

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Parse a mix; missing values get their defaults. Raises ``ValueError`` with a description
        of the problem."""
        known = {field.name: field.default for field in fields(cls)}
        given: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            match = _PART.fullmatch(part.strip())
            if match is None or match[1] not in known:
                names = ", ".join(known)
                fix = f"Write name=number with {names}, e.g. users=200,turns=6"
                raise ValueError(f'has "{part}". {fix}')
            given[match[1]] = float(match[2])
        whole = {name: int(value) for name, value in given.items() if type(known[name]) is int}
        mix = cls(**{**given, **whole})  # type: ignore[arg-type]  # whole numbers are int here
        if mix.users < 1 or mix.turns < 1 or mix.gap <= 0 or mix.hours <= 0:
            raise ValueError("has no requests. Give at least one user, turn, second and hour")
        if mix.requests > REQUESTS_MAX:
            raise ValueError(
                f"makes {mix.requests:,.0f} requests, more than {REQUESTS_MAX:,}. "
                "Give fewer users or hours, or a longer gap"
            )
        longest = mix.tokens(mix.turns - 1)
        if mix.turns > TURNS_MAX or longest > TOKENS_MAX:
            raise ValueError(
                f"makes conversations of {mix.turns:,} turns and {longest:,} tokens, more than "
                f"{TURNS_MAX:,} or {TOKENS_MAX:,}. Give fewer turns or tokens"
            )
        return mix

    @property
    def requests(self) -> float:
        """The approximate number of requests."""
        return self.users * self.hours * 3600 / self.gap

    def tokens(self, turn: int) -> int:
        """Length of the prompt of a turn, from 0."""
        return self.system + (turn + 1) * self.prompt + turn * self.answer

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name):g}" for field in fields(self))


def mix_trace(mix: Mix, block_tokens: int) -> Trace:
    """Generate the trace of a mix, in blocks of ``block_tokens`` tokens."""
    draw = random.Random(0)
    end_s = mix.hours * 3600
    shared = mix.system // block_tokens
    per_session = max(0, mix.tokens(mix.turns - 1) // block_tokens - shared)
    requests: list[Request] = []
    first_id, session = shared, 0
    # On average `users` conversations are active, for `turns * gap` seconds each, so in this time
    # `users` new ones start.
    begin_s = -mix.turns * mix.gap
    while begin_s < end_s:
        requests += _conversation(mix, block_tokens, begin_s, session, first_id, shared, draw)
        first_id += per_session
        session += 1
        begin_s += draw.expovariate(mix.users / (mix.turns * mix.gap))
    inside = [request for request in requests if 0 <= request.time_s < end_s and request.runs]
    inside.sort(key=lambda request: request.time_s)
    return Trace(f"mix {mix}", block_tokens, inside)


def _conversation(
    mix: Mix,
    block_tokens: int,
    begin_s: float,
    session: int,
    first_id: int,
    shared: int,
    draw: random.Random,
) -> list[Request]:
    found = []
    time_s = begin_s
    for turn in range(mix.turns):
        tokens = mix.tokens(turn)
        own = tokens // block_tokens - shared
        runs = ((0, shared), (first_id, own))
        found.append(
            Request(
                time_s,
                tokens,
                tuple(run for run in runs if run[1] > 0),
                mix.answer,
                session,
                last=turn == mix.turns - 1,
            )
        )
        time_s += draw.expovariate(1 / mix.gap)
    return found

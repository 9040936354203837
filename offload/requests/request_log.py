"""The log of requests and their misses: the last entries, totals for the metrics, and the sinks
that get each entry (``offload.requests.request_file``, vLLM's traces).

Part of the scheduler side, on its thread; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from offload.planner.look_ahead.ahead_use import NOT_READ_AHEAD, AheadUse
from offload.requests.miss_reasons import Miss, Reason


@dataclass(slots=True)
class LoggedRequest:
    """The result of one request's lookup.

    Token counts: ``gpu_tokens`` came from vLLM's own cache, ``wanted_tokens`` were looked up beyond
    them, and ``hit_tokens`` of those were found; ``loaded`` has the tokens loaded by tier.
    ``ahead`` is what was read into the CPU tier while the request waited, and ``waited_s`` the time
    for which it got no GPU blocks because of these reads. ``time_s`` is Unix time. ``lookup_s`` is
    the time from the request's first lookup until vLLM accepted the result, and ``load_s`` that of
    its load on the slowest rank; ``None`` if nothing was loaded. A ``final`` entry no longer
    changes. ``trace_headers`` name the span of the client, if vLLM traces.
    """

    request: str
    time_s: float
    prompt_tokens: int
    gpu_tokens: int
    wanted_tokens: int = 0
    hit_tokens: int = 0
    loaded: Mapping[str, int] = field(default_factory=dict)
    ahead: AheadUse = NOT_READ_AHEAD
    waited_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float | None = None
    miss: Miss = field(default_factory=lambda: Miss(Reason.COMPLETE))
    final: bool = False
    trace_headers: Mapping[str, str] | None = None

    def note_read_ahead(self, ahead: AheadUse) -> None:
        """Set what look-ahead did for the request, unless the entry is final."""
        if not self.final:
            self.ahead = ahead

    def set_load_time(self, load_s: float | None) -> None:
        """Record the time of a load that has succeeded."""
        self.load_s = load_s

    def as_json(self) -> dict[str, Any]:
        """The entry as plain values, as written to the file."""
        miss = self.miss
        found: dict[str, Any] = {
            "request": self.request,
            "time": round(self.time_s, 3),
            "prompt_tokens": self.prompt_tokens,
            "gpu_tokens": self.gpu_tokens,
            "wanted_tokens": self.wanted_tokens,
            "loaded_tokens": dict(self.loaded),
            "reason": miss.reason.value,
        }
        found |= self.look_ahead()
        if miss.key:
            found["missing"] = {
                "group": miss.group,
                "at_token": miss.depth_tokens,
                "key": miss.key.hex(),
            }
        more = {"tier": miss.tier, "policy": miss.policy, "note": miss.note}
        found |= {name: value for name, value in more.items() if value}
        if miss.ago_s is not None:
            found["ago_s"] = round(miss.ago_s, 1)
        return found

    def look_ahead(self) -> dict[str, float]:
        """The result of look-ahead for the request: values above 0, by their names in the file."""
        ahead, found = self.ahead, dict[str, float]()
        if self.loaded:
            found["ahead_tokens"] = ahead.tokens
            found["ahead_late_tokens"] = ahead.late_tokens
            found["ahead_saved_s"] = round(ahead.saved_s, 3)
        found["ahead_wasted_tokens"] = ahead.wasted_tokens
        found["waited_s"] = round(self.waited_s, 3)
        return {name: value for name, value in found.items() if value}


class Sink(Protocol):
    """Receives final entries. Never waits and never raises."""

    @property
    def dropped(self) -> int:
        """Number of entries that were not accepted because the sink was too slow or had failed."""

    def __call__(self, logged: LoggedRequest) -> None: ...

    def close(self) -> None: ...


class RequestLog:
    """Keeps the last ``records_max`` requests and counts all of them.

    ``changes`` counts how often the totals have changed. Each of ``sinks`` gets a request's entry
    when its outcome is known.
    """

    def __init__(self, records_max: int = 256, *sinks: Sink) -> None:
        self.last: deque[LoggedRequest] = deque(maxlen=records_max)
        self.requests: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.recomputed_tokens: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.wanted_tokens = 0
        self.changes = 0
        self._sinks = sinks

    def add(self, logged: LoggedRequest) -> None:
        """Add the entry of a request whose lookup is complete."""
        self.last.append(logged)
        self.wanted_tokens += logged.wanted_tokens
        self._count(logged, logged.wanted_tokens - logged.hit_tokens)

    def count_failed_load(self, logged: LoggedRequest, reason: Reason) -> None:
        """Count the request again under this reason, because its hit could not be loaded."""
        logged.loaded = {}
        logged.miss = Miss(reason)
        self._count(logged, logged.hit_tokens)

    def finalize(self, logged: LoggedRequest, loaded: Mapping[str, int] | None = None) -> None:
        """Pass on the entry, which is final. ``loaded`` are the tokens by tier of a load that has
        succeeded."""
        if loaded is not None:
            logged.loaded = loaded
        logged.final = True
        for sink in self._sinks:
            sink(logged)

    def close(self) -> None:
        """Pass on all entries, because the server stops."""
        for sink in self._sinks:
            sink.close()

    def _count(self, logged: LoggedRequest, tokens: int) -> None:
        self.requests[logged.miss.reason] += 1
        self.recomputed_tokens[logged.miss.reason] += tokens
        self.changes += 1

    def totals(self) -> dict[str, float]:
        """Counters by flat name."""
        totals: dict[str, float] = {"wanted_tokens": self.wanted_tokens}
        for reason in Reason:
            totals[f"misses:{reason.value}"] = self.requests[reason]
            totals[f"recomputed_tokens:{reason.value}"] = self.recomputed_tokens[reason]
        del totals["misses:complete"], totals["recomputed_tokens:complete"]
        lost = sum(sink.dropped for sink in self._sinks)
        complete = self.requests[Reason.COMPLETE]
        return totals | {"complete_lookups": complete, "requests_lost": lost}

"""Reads a server's ``/metrics`` for ``kvtiers top``: tiers, totals, and rates from two pages.

Versions publish different metrics: a missing metric is ``None`` and shown as a dash. For several
engines (data-parallel replicas), numbers are added up and the worst state is shown.
"""

from __future__ import annotations

import base64
import http.client
import math
import string
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.telemetry.metrics import PREFIX

TIMEOUT_S = 10.0
PAGE_BYTES_MAX = 64 << 20
PART_BYTES = 1 << 17

STATES = {0: "closed", 1: "half-open", 2: "open"}
HIGHEST = ("breaker_state",)
MEAN = ("used_ratio",)
LOWEST = ("break_even",)

TIER_RATES = {
    "loaded_tokens_per_s": "loaded_tokens_total",
    "hit_tokens_per_s": "hit_tokens_total",
    "missed_tokens_per_s": "missed_tokens_total",
    "stored_chunks_per_s": "stored_chunks_total",
    "evicted_chunks_per_s": "evicted_chunks_total",
    "dropped_chunks_per_s": "dropped_chunks_total",
    "read_bytes_per_s": "read_bytes_total",
    "write_bytes_per_s": "write_bytes_total",
}
SERVER_RATES = {
    "load_bytes_per_s": "load_bytes_total",
    "store_bytes_per_s": "store_bytes_total",
    "ahead_read_bytes_per_s": "ahead_read_bytes_total",
    "loads_per_s": "loads_total",
    "misses_per_s": "misses_total",
}
SERVER_COUNTS = (
    *("load_failures_total", "load_timeouts_total", "load_refusals_total", "store_refusals_total"),
    *("corrupt_records_total", "set_aside_total", "refused_records_total"),
    *("write_failures_total", "tier_errors_total", "hook_faults_total"),
)
AHEAD_SHARES = ("used", "late", "wasted")
MISSES = f"{PREFIX}misses_total"
HIT_QUERIES = "vllm:external_prefix_cache_queries_total"
HIT_TOKENS = "vllm:external_prefix_cache_hits_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"


class PageError(Exception):
    """The page cannot be fetched, or does not come from a server with this connector."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one moment: by metric name, then by tier (empty for metrics without tiers)."""

    at_s: float
    samples: Mapping[str, Mapping[str, list[float]]]
    reasons: Mapping[str, float] = field(default_factory=dict)
    """Misses since the start of the server, by reason."""

    def value(self, name: str, tier: str | None = "") -> float | None:
        """One number; with ``tier=None`` the sum over all labels. ``None`` if the page
        lacks it."""
        by_tier = self.samples.get(name)
        if by_tier is None:
            return None
        if tier is None:
            found = [value for values in by_tier.values() for value in values]
        else:
            found = by_tier.get(tier, [])
        if not found:
            return None
        own = name.removeprefix(PREFIX)
        if own in HIGHEST:
            return max(found)
        if own in LOWEST:
            return min(found)
        return sum(found) / len(found) if own in MEAN else sum(found)

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers, CPU first."""
        names = {
            tier
            for name, by_tier in self.samples.items()
            if name.startswith(PREFIX)
            for tier in by_tier
            if tier
        }
        return sorted(names, key=lambda tier: (tier != "cpu", tier))


@dataclass(slots=True)
class TierView:
    """One tier. Bytes and seconds; ``None`` means unknown. Rates are over the time between two
    pages."""

    name: str
    resident_chunks: float | None = None
    used_ratio: float | None = None
    used_bytes: float | None = None
    capacity_bytes: float | None = None
    breaker: str | None = None
    pays: bool | None = None
    queue_depth: float | None = None
    loaded_tokens: float | None = None
    rates: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class View:
    """All values to show. ``hit_ratio`` is a share of the prompt tokens that vLLM asked the tiers
    for; ``misses`` counts requests since the start of the server, by reason; ``ahead_shares`` are
    shares, since then, of the bytes that look-ahead has read, and ``ahead_saved_s`` is the time
    that it has saved."""

    tiers: list[TierView]
    running: float | None
    waiting: float | None
    prompt_tokens_per_s: float | None
    hit_ratio: float | None
    hit_ratio_since_start: float | None
    rates: dict[str, float | None]
    counts: dict[str, float | None]
    misses: dict[str, float]
    ahead_shares: dict[str, float | None]
    ahead_saved_s: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TierHits:
    """Tokens since the server started: wanted and found, restored, and missing."""

    name: str
    hit_tokens: float
    loaded_tokens: float
    missed_tokens: float


def hits(page: Page) -> list[TierHits]:
    """Return the lookups and hits of every tier."""
    return [
        TierHits(
            name,
            *(
                page.value(f"{PREFIX}{what}_tokens_total", name) or 0.0
                for what in ("hit", "loaded", "missed")
            ),
        )
        for name in page.tiers
    ]


def metrics_url(text: str) -> str:
    """The address of a server's metrics, from ``host:port`` or any address of the server. Raises
    ``ValueError``."""
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(address)
        is_plain = address.isprintable() and " " not in address
        is_good = parts.scheme in ("http", "https") and parts.hostname and is_plain
        _ = parts.port  # raises ValueError for a port that is not a number
    except ValueError:  # the exception's text may repeat a part of the password
        is_good = False
    if not is_good:
        raise ValueError(f'is not the address of a server (got "{_without_password(text)}")')
    path = parts.path if parts.path.strip("/") else "/metrics"
    path, query = (
        urllib.parse.quote(text, safe=string.punctuation) for text in (path, parts.query)
    )  # what is quoted already stays so
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, query, ""))


def shown_url(url: str) -> str:
    """An address as it may be printed: without the user and the password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _without_password(text: str) -> str:
    """Like ``shown_url``, for a text that is not an address: hides everything before an ``@``."""
    _, hidden, host = text.rpartition("@")
    return f"...@{host}" if hidden else text


def fetch(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """The page's text. ``user:password@`` before the host is sent as HTTP's basic authentication,
    to this address only. Raises ``PageError``, without the password."""
    user, found, _ = urllib.parse.urlsplit(url).netloc.rpartition("@")
    url = shown_url(url)
    try:
        request = urllib.request.Request(url)
        if found:
            user += "" if ":" in user else ":"
            token = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        end_s = time.monotonic() + timeout_s
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            page = bytearray()
            while len(page) < PAGE_BYTES_MAX and (part := answer.read1(PART_BYTES)):
                page += part
                if time.monotonic() > end_s:  # urlopen's limit is for each part
                    raise TimeoutError("timed out")
            return page.decode("utf-8", "replace")
    except http.client.HTTPException as error:  # another protocol, or a page that is cut off
        raise PageError(f"{url} answers, but not like a web server: {error!r}") from error
    except urllib.error.HTTPError as error:
        error.close()
        line = str(error.reason).partition("\n")[0]  # Python's text about redirects has three
        raise PageError(f"{url} answers {error.code} {line}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or reason
        raise PageError(f"{url} does not answer: {text}") from error


def parse(text: str, at_s: float) -> Page:
    """The numbers of a page. Raises ``PageError``."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[str, list[float]]] = {}
    reasons: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                if sample.name.startswith("vllm:"):
                    by_tier = samples.setdefault(sample.name, {})
                    by_tier.setdefault(sample.labels.get("tier", ""), []).append(sample.value)
                if sample.name == MISSES and sample.value:
                    reason = sample.labels.get("reason", "unknown")
                    reasons[reason] = reasons.get(reason, 0.0) + sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise PageError(f"the page does not contain Prometheus metrics: {error}") from error
    if not any(name.startswith(PREFIX) for name in samples):
        what = "metrics of vLLM, but none of kvtiers" if samples else "no metrics of vLLM"
        raise PageError(
            f"the page has {what}. Start the server with the KvTiersConnector, and without "
            "--disable-log-stats"
        )
    return Page(at_s, samples, reasons)


def view(now: Page, before: Page | None = None) -> View:
    """Collect the values to show from a page; rates need an earlier one."""
    return View(
        tiers=[_tier(name, now, before) for name in now.tiers],
        running=now.value("vllm:num_requests_running", None),
        waiting=now.value("vllm:num_requests_waiting", None),
        prompt_tokens_per_s=_rate(PROMPT_TOKENS, None, now, before),
        hit_ratio=_ratio(_gain(HIT_TOKENS, now, before), _gain(HIT_QUERIES, now, before)),
        hit_ratio_since_start=_ratio(now.value(HIT_TOKENS, None), now.value(HIT_QUERIES, None)),
        rates={
            short: _rate(PREFIX + name, None, now, before) for short, name in SERVER_RATES.items()
        },
        counts={name: now.value(PREFIX + name, None) for name in SERVER_COUNTS},
        misses=dict(now.reasons),
        ahead_shares=_ahead_shares(now),
        ahead_saved_s=now.value(f"{PREFIX}ahead_saved_seconds_total"),
        seconds=now.at_s - before.at_s if before else 0.0,
    )


def _ahead_shares(now: Page) -> dict[str, float | None]:
    read = now.value(f"{PREFIX}ahead_read_bytes_total")
    return {
        what: _ratio(now.value(f"{PREFIX}ahead_{what}_bytes_total"), read) for what in AHEAD_SHARES
    }


def _tier(name: str, now: Page, before: Page | None) -> TierView:
    def value(metric: str) -> float | None:
        return now.value(PREFIX + metric, name)

    state, pays = value("breaker_state"), value("break_even")
    return TierView(
        name,
        resident_chunks=value("resident_chunks"),
        used_ratio=value("used_ratio"),
        used_bytes=value("used_bytes"),
        capacity_bytes=value("capacity_bytes"),
        breaker=None if state is None else STATES.get(int(state), str(state)),
        pays=None if pays is None else bool(pays),
        queue_depth=value("queue_depth"),
        loaded_tokens=value("loaded_tokens_total"),
        rates={
            short: _rate(PREFIX + metric, name, now, before) for short, metric in TIER_RATES.items()
        },
    )


def _gain(name: str, now: Page, before: Page | None, tier: str | None = None) -> float | None:
    """Return the growth of a counter; after a restart of the server, its value since then."""
    value = now.value(name, tier)
    if value is None or before is None:
        return None
    gain = value - (before.value(name, tier) or 0.0)
    return gain if gain >= 0 else value


def _rate(name: str, tier: str | None, now: Page, before: Page | None) -> float | None:
    gain = _gain(name, now, before, tier)
    if gain is None or before is None or now.at_s <= before.at_s:
        return None
    return gain / (now.at_s - before.at_s)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None

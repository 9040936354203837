"""``kvtiers top``: a live view of a running server, from its ``/metrics``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import AsJson, Problems, give_up, make_app, print_json, screen, size_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from offload.admin.metrics_client import Page, TierView, View

app = make_app()

COLUMNS = (
    *("tier", "used", "chunks", "loaded tok/s", "hit tok/s", "missed tok/s", "stored ch/s"),
    *("evicted ch/s", "read", "written", "queue", "state", "loading pays"),
)
LEFT = ("tier", "state", "loading pays")
RATES = {
    **{name: f"{name}_tokens_per_s" for name in ("loaded", "hit", "missed")},
    **{name: f"{name}_chunks_per_s" for name in ("stored", "evicted")},
}
REASONS_SHOWN = 5
COUNT_NAMES = {
    "load_failures_total": "failed loads",
    "load_timeouts_total": "late loads",
    "load_refusals_total": "refused loads",
    "store_refusals_total": "chunks without a slot",
    "corrupt_records_total": "corrupt records",
    "set_aside_total": "tiers begun empty",
    "refused_records_total": "records refused at a start",
    "write_failures_total": "records not written",
    "tier_errors_total": "tier errors",
    "hook_faults_total": "hook faults",
}


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Address of the server, as localhost:8000.")],
    interval: Annotated[
        float,
        typer.Option(
            min=0.0, max=86_400.0, help="Seconds between two views; rates cover this time."
        ),
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Show one view and exit; with --interval 0 it has no rates."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running server's tiers: how full, how fast, and what went wrong.

    --json prints one view and ends. Exits with 1 if the server does not answer, or has no metrics
    of kvtiers.
    """
    from offload.admin.metrics_client import PageError, metrics_url, shown_url

    problems = Problems()
    address = ""
    try:
        address = metrics_url(url)
    except ValueError as error:
        problems.add("url", str(error), "Write localhost:8000 or http://host:8000.")
    problems.refuse("top")
    try:
        if once or as_json:
            _one_view(address, interval, as_json)
        else:
            _follow(address, max(interval, 0.2))
    except PageError as error:
        text = str(error)
        give_up("top", text if text.startswith("http") else f"{shown_url(address)}: {text}")
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def _look(address: str) -> Page:
    from offload.admin.metrics_client import fetch, parse

    return parse(fetch(address), time.monotonic())


def _one_view(address: str, interval: float, as_json: bool) -> None:
    from offload.admin.metrics_client import shown_url, view

    before = _look(address) if interval else None
    time.sleep(interval)
    found = view(_look(address), before)
    if as_json:
        print_json({"url": shown_url(address), **found.to_json()})
    else:
        screen().print(_shown(found))


def _follow(address: str, interval: float) -> None:
    """Redraw until Ctrl-C, or, into a file or a pipe, write one view after the other."""
    from rich.live import Live

    out = screen()
    views = _views(address, interval)
    first = next(views)  # a server that does not answer at all ends this
    if not out.is_terminal:
        for found in itertools.chain([first], views):
            out.print(found)
        return
    with Live(first, console=out, screen=False, auto_refresh=False) as live:
        for found in views:
            live.update(found, refresh=True)


def _views(address: str, interval: float) -> Iterator[RenderableType]:
    """One view after the other; a server that is away for a moment is waited for."""
    from offload.admin.metrics_client import PageError, view

    before = _look(address)
    yield _shown(view(before))
    while True:
        time.sleep(interval)
        try:
            now = _look(address)
        except PageError as error:
            yield f"{error}; trying again"
            continue
        yield _shown(view(now, before))
        before = now


def _shown(found: View) -> Group:
    from rich.console import Group

    parts: list[RenderableType] = [_head(found), _table(found.tiers)]
    if any(found.rates[name] for name in ("load_bytes_per_s", "store_bytes_per_s")):
        rates = {"to the GPU": "load_bytes_per_s", "from the GPU": "store_bytes_per_s"}
        parts.append(", ".join(f"{name} {_speed(found.rates[r])}" for name, r in rates.items()))
    counts = [f"{COUNT_NAMES[name]} {count:,.0f}" for name, count in found.counts.items() if count]
    if counts:
        parts.append("since the start: " + ", ".join(counts))
    reasons = sorted(found.misses.items(), key=lambda item: -item[1])[:REASONS_SHOWN]
    if reasons:
        parts.append("missed because: " + ", ".join(f"{why} {n:,.0f}" for why, n in reasons))
    return Group(*parts)


def _head(found: View) -> str:
    parts = [
        f"running {_number(found.running)}, waiting {_number(found.waiting)}",
        f"prompt tokens/s {_number(found.prompt_tokens_per_s)}",
        f"hits {_percent(found.hit_ratio)} of what was asked "
        f"({_percent(found.hit_ratio_since_start)} since the start)",
    ]
    if found.rates.get("misses_per_s") is not None:
        parts.append(f"misses/s {_number(found.rates['misses_per_s'])}")
    return "; ".join(parts)


def _table(tiers: list[TierView]) -> Table:
    from rich.table import Table

    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
    for tier in tiers:
        pays = "-" if tier.pays is None else "yes" if tier.pays else "no"
        table.add_row(
            tier.name,
            _used(tier),
            _number(tier.resident_chunks),
            *(_number(tier.rates[name]) for name in RATES.values()),
            _speed(tier.rates["read_bytes_per_s"]),
            _speed(tier.rates["write_bytes_per_s"]),
            _number(tier.queue_depth),
            tier.breaker or "-",
            pays,
        )
    return table


def _used(tier: TierView) -> str:
    text = _percent(tier.used_ratio)
    if tier.used_bytes is not None:
        text = f"{size_text(tier.used_bytes)}, {text}"
    if tier.capacity_bytes is not None:
        text += f" of {size_text(tier.capacity_bytes)}"
    return text


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{size_text(value)}/s"

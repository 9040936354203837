"""``kvtiers top``: shows a live view of a running server, from its ``/metrics``."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from offload.cli.common import (
    AsJson,
    Problems,
    give_up,
    make_app,
    named_if_slow,
    print_json,
    screen,
)
from offload.cli.numbers import UNKNOWN, count_text, share_text, size_text, speed_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from offload.admin.metrics_client import Page, TierView, View

app = make_app()

LABEL_WIDTH = 10
REASONS_SHOWN = 5
COUNT_NAMES = {
    "load_failures_total": "failed loads",
    "load_timeouts_total": "late loads",
    "load_refusals_total": "refused loads",
    "store_refusals_total": "chunks without a slot",
    "corrupt_records_total": "corrupt records",
    "set_aside_total": "tiers that began empty",
    "refused_records_total": "records dropped at start-up",
    "write_failures_total": "records not written",
    "tier_errors_total": "tier errors",
    "hook_faults_total": "hook faults",
}


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "localhost:8000",
    interval: Annotated[
        float,
        typer.Option(
            min=0.0, max=86_400.0, help="Seconds between two views; rates cover this time."
        ),
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Show one view, then exit. With --interval 0 the view has no rates."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a running server's tiers: how full, how fast, and what went wrong.

    --json prints one view and exits. Exits with 1 if the server does not answer, or has no metrics
    of kvtiers.
    """
    from offload.admin.metrics_client import PageError, metrics_url, shown_url

    problems = Problems()
    address = ""
    try:
        address = metrics_url(url)
    except ValueError as error:
        problems.add("url", str(error), "Write localhost:8000 or http://host:8000.")
    if math.isnan(interval):  # older versions of typer accept nan
        problems.add("--interval", "is not a number (got nan)", "Give seconds.")
    problems.refuse("top")
    try:
        if once or as_json:
            _one_view(address, interval, as_json)
        else:
            _follow(address, max(interval, 0.2))
    except PageError as error:
        text = str(error)
        hint = "" if has_port(address) else f". Did you mean {url.rstrip('/')}:8000?"
        text = text if text.startswith("http") else f"{shown_url(address)}: {text}"
        give_up("top", f"{text}{hint}")


def has_port(address: str) -> bool:
    """True if an address names its port, or a path, as behind a proxy."""
    parts = urlsplit(address)
    return parts.port is not None or parts.path != "/metrics"


def _look(address: str) -> Page:
    from offload.admin.metrics_client import fetch, parse

    return parse(fetch(address), time.monotonic())


def _first_look(address: str) -> Page:
    with named_if_slow("top", address):
        return _look(address)


def _one_view(address: str, interval: float, as_json: bool) -> None:
    from offload.admin.metrics_client import shown_url, view

    first = _first_look(address)
    found = view(first)
    if interval:
        time.sleep(interval)
        found = view(_look(address), first)
    if as_json:
        print_json({"url": shown_url(address), **found.to_json()})
    else:
        screen().print(_shown(found))


def _follow(address: str, interval: float) -> None:
    """Redraw until Ctrl-C or, into a file or a pipe, write one view after another."""
    from rich.live import Live

    out = screen()
    views = _views(address, interval)
    first = next(views)  # do not wait for a server that never answers
    if not out.is_terminal:
        for found in itertools.chain([first], views):
            out.print(found)
        return
    with Live(first, console=out, screen=False, auto_refresh=False) as live:
        for found in views:
            live.update(found, refresh=True)


def _views(address: str, interval: float) -> Iterator[RenderableType]:
    """Yield one view after another; wait for a server that is briefly unreachable."""
    from offload.admin.metrics_client import PageError, view

    before = _first_look(address)
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


def _shown(found: View) -> Table:
    """One block for the server and one for each tier; long lines are continued on the next line."""
    from rich.markup import escape
    from rich.table import Table

    from policies.simulation.tables import printable

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=LABEL_WIDTH)
    grid.add_column(overflow="fold")
    blocks = [_server(found), *(_tier(tier) for tier in found.tiers)]
    for number, block in enumerate(blocks):
        if number:
            grid.add_row()
        for label, text in block.items():
            if text:
                grid.add_row(label, escape(printable(text)))
    return grid


def _server(found: View) -> dict[str, str]:
    """Lines about the whole server, by label. Those without text are left out."""
    counts = [f"{COUNT_NAMES[name]} {count:,.0f}" for name, count in found.counts.items() if count]
    reasons = sorted(found.misses.items(), key=lambda item: -item[1])[:REASONS_SHOWN]
    copies = {"to the GPU": "load_bytes_per_s", "from the GPU": "store_bytes_per_s"}
    copied = [f"{speed_text(found.rates[name])} {way}" for way, name in copies.items()]
    missed = found.rates.get("misses_per_s")
    return {
        "requests": f"{count_text(found.running)} running, {count_text(found.waiting)} waiting; "
        f"{count_text(found.prompt_tokens_per_s)} prompt tokens/s",
        "hits": f"{share_text(found.hit_ratio)} of the requested tokens "
        f"({share_text(found.hit_ratio_since_start)} since the start)",
        "misses": "" if missed is None else f"{count_text(missed)} requests/s",
        "  because": ", ".join(f"{why} {n:,.0f}" for why, n in reasons),
        "look-ahead": _look_ahead(found),
        "copies": ", ".join(copied) if any(map(found.rates.get, copies.values())) else "",
        "faults": ", ".join(counts),
    }


def _look_ahead(found: View) -> str:
    """The speed of look-ahead and what became of its reads; empty if it has read nothing."""
    shares = [f"{share_text(share)} {what}" for what, share in found.ahead_shares.items()]
    if not any(share is not None for share in found.ahead_shares.values()):
        return ""
    speed = speed_text(found.rates["ahead_read_bytes_per_s"])
    saved = "" if found.ahead_saved_s is None else f", {found.ahead_saved_s:,.1f} s saved"
    return f"{speed} read ahead; since the start {', '.join(shares)}{saved}"


def _tier(tier: TierView) -> dict[str, str]:
    """Lines about one tier, by label."""
    from rich.markup import escape

    from policies.simulation.tables import printable

    rates = tier.rates
    tokens = [f"{count_text(rates[f'{n}_tokens_per_s'])} {n}" for n in ("loaded", "hit", "missed")]
    chunks = [f"{count_text(rates[f'{n}_chunks_per_s'])} {n}" for n in ("stored", "evicted")]
    read, written = rates["read_bytes_per_s"], rates["write_bytes_per_s"]
    state = []
    if tier.breaker is not None:
        state.append(f"breaker: {tier.breaker}")
    if tier.pays is not None:
        state.append(f"loading pays: {'yes' if tier.pays else 'no'}")
    if tier.queue_depth is not None:
        state.append(f"queue: {count_text(tier.queue_depth)}")
    is_disk = read is not None or written is not None
    return {
        f"[bold]{escape(printable(tier.name))}[/bold]": _used(tier),
        "  state": "; ".join(state),
        "  tokens/s": ", ".join(tokens),
        "  chunks/s": ", ".join(chunks),
        "  disk": f"{speed_text(read)} read, {speed_text(written)} written" if is_disk else "",
    }


def _used(tier: TierView) -> str:
    """How full the tier is, in bytes, percent and chunks, as far as the server reports it."""
    share, parts = tier.used_ratio, []
    if tier.used_bytes is not None:
        size = size_text(tier.used_bytes)
        if tier.capacity_bytes:
            size += f" of {size_text(tier.capacity_bytes)}"
            share = tier.used_bytes / tier.capacity_bytes if share is None else share
        parts.append(size)
    if share is not None:
        parts.append(f"{share_text(share)} full")
    if tier.resident_chunks is not None:
        parts.append(f"{count_text(tier.resident_chunks)} chunks")
    return ", ".join(parts) or UNKNOWN

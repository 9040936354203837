"""``kvtiers inspect``: shows the contents of a tier's path."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    Folder,
    Problems,
    give_up,
    guarded_work,
    make_app,
    named_if_slow,
    print_json,
    print_line,
    progress_bar,
    screen,
)
from offload.cli.numbers import age_text, share_text, size_text

if TYPE_CHECKING:
    from offload.admin.inspect import NamespaceSummary, RankSummary
    from offload.admin.metrics_client import TierHits
    from policies.simulation.tables import FittingTable

app = make_app()

NO_HITS = (
    "Hits are not stored on disk: a running server counts them (--server URL). Times of last use "
    "can be up to 5 s old."
)
COLUMNS = (
    *("replica/rank", "kind", "used by", "records", "payload", "of capacity", "record size"),
    "last use",
)
AGE_NAMES = {
    "1h": "< 1h",
    "1d": "< 1d",
    "7d": "< 7d",
    "30d": "< 30d",
    "older": "older",
    "unknown": "unknown",
}
"""Columns of the histogram of last uses; columns without records are not shown."""


@app.command()
def inspect(
    folder: Folder,
    server: Annotated[
        str,
        typer.Option(
            help=(
                "Address of a server that uses the folder, e.g. localhost:8000. Adds the hits "
                "of its tiers since it started."
            )
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the namespaces below a tier's path: records, sizes, ages, and who uses them.

    Works while a server runs on the folder. Exits with 1 if a part of the folder cannot be read, or
    if the next server to start would not use it.
    """
    from offload.admin.inspect import summarise, to_json
    from offload.admin.metrics_client import shown_url

    problems = Problems()
    namespaces = problems.namespaces(folder)
    address = problems.metrics_url("--server", server)
    problems.refuse("inspect")
    hits = _hits(address) if address else []
    with guarded_work("inspect"), progress_bar(is_bytes=False) as bar:
        task = bar.add_task("records", total=None)
        found = summarise(namespaces, lambda count: bar.advance(task, count))
    if as_json:
        answer = {"server": {"url": shown_url(address), "tiers": [asdict(tier) for tier in hits]}}
        of_server = answer if address else {}
        print_json({"folder": str(folder), "namespaces": to_json(found), **of_server})
    else:
        _print(found, hits)
    served = [
        about for namespace, about in zip(namespaces, found, strict=True) if namespace.is_served
    ]
    if any(
        namespace.problem or any(summary.problem for summary in namespace.rank_folders)
        for namespace in served
    ):
        raise SystemExit(1)


def _hits(address: str) -> list[TierHits]:
    """Fetch the hits of the server's tiers."""
    from offload.admin.metrics_client import PageError, fetch, hits, parse, shown_url

    try:
        with named_if_slow("inspect", address):
            page = fetch(address)
        return hits(parse(page, 0.0))
    except PageError as error:
        text = str(error)
        give_up("inspect", text if text.startswith("http") else f"{shown_url(address)}: {text}")


def _print(namespaces: list[NamespaceSummary], hits: list[TierHits]) -> None:
    out = screen()
    for namespace in namespaces:
        print_line(out, f"{namespace.name or 'one tier'}  {_about(namespace)}", style="bold")
        for path, here, newest in namespace.differs:
            line = f"  differs from the namespace used last: {path} is {here}, not {newest}"
            print_line(out, line)
        out.print(_table(namespace.rank_folders))
        for summary in namespace.rank_folders:
            aside = f"{size_text(summary.aside_bytes)} were moved aside as damaged"
            remarks = (summary.problem, summary.remark, aside if summary.aside_bytes else "")
            for text in filter(None, remarks):
                line = f"  replica {summary.replica} rank {summary.rank}: {text}"
                print_line(out, line)
    for tier in hits:
        line = (
            f"server: {tier.name}: {tier.hit_tokens:,.0f} tokens hit, "
            f"{tier.loaded_tokens:,.0f} loaded, {tier.missed_tokens:,.0f} missed"
        )
        print_line(out, line)
    if not hits:
        print_line(out, NO_HITS, style="dim")


def _about(namespace: NamespaceSummary) -> str:
    users = {f"pid {owner.pid}" for owner in namespace.owners}
    parts = [
        namespace.model or "model unknown",
        f"{size_text(namespace.disk_bytes)} on disk",
        f"last used {age_text(int(namespace.last_used_s * 1e9))} ago",
        f"in use by {', '.join(sorted(users))}" if users else "not in use",
    ]
    return ", ".join(parts) + (f"; {namespace.problem}" if namespace.problem else "")


def _table(ranks: list[RankSummary]) -> FittingTable:
    from policies.simulation.tables import FittingTable

    ages = [age for summary in ranks for age, count in summary.ages.items() if count]
    shown = [age for age in AGE_NAMES if age in ages]
    headings = (*COLUMNS, *(AGE_NAMES[age] for age in shown))
    table = FittingTable(headings, right=headings[3:])
    for summary in ranks:
        table.add_row(*_cells(summary), *(f"{summary.ages.get(age, 0):,}" for age in shown))
    return table


def _cells(summary: RankSummary) -> list[str]:
    share = "?"
    if summary.capacity_bytes:
        full = summary.stored_bytes / summary.capacity_bytes
        share = f"{share_text(full)} of {size_text(summary.capacity_bytes)}"
    sizes = [size_text(summary.smallest_bytes), size_text(summary.largest_bytes)]
    return [
        f"{summary.replica}/{summary.rank}",
        summary.kind,
        f"pid {summary.owner_pid}" if summary.owner_pid is not None else "",
        f"{summary.records:,}",
        size_text(summary.payload_bytes),
        share,
        " to ".join(dict.fromkeys(sizes)) if summary.records else "",
        f"{age_text(summary.oldest_use_ns)} to {age_text(summary.newest_use_ns)}",
    ]

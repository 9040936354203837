"""``kvtiers verify``: read and check every record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    Folder,
    KeyFile,
    Problems,
    at_a_store,
    make_app,
    print_json,
    progress_bar,
    screen,
    size_text,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from offload.scrub import Scrubbed
    from offload.stores import Store

app = make_app()

LIVE_RATE = "100MiB"
"""Beside a server the disk is the server's."""
SHOWN_MAX = 20


@app.command()
def verify(
    folder: Folder,
    rate: Annotated[
        str,
        typer.Option(
            help="Bytes to read per second at most, as 200MiB; 0 for no limit. "
            f"(default: {LIVE_RATE} where a server uses the store, else no limit)"
        ),
    ] = "",
    check_only: Annotated[bool, typer.Option("--check-only", help="Remove nothing.")] = False,
    key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Read every record and check it against its checksum, key, namespace and epoch.

    Damaged records are removed where no server uses the store. A running server drops them itself
    when it reads them, and computes the prompt. Ends with 1 if anything was damaged.
    """
    problems = Problems()
    bytes_per_s = problems.size("--rate", rate, -1)
    homes = problems.homes(folder)
    problems.refuse("verify")
    stores = [store for home in homes for store in home.stores if store.kind != "empty"]
    with at_a_store("verify"), progress_bar(is_bytes=True) as bar:
        results = [_one(store, bytes_per_s, key_file, check_only, bar) for store in stores]
    if as_json:
        ok = not any(result.damaged for result in results)
        stores_json = [result.to_json() for result in results]
        print_json({"folder": str(folder), "ok": ok, "stores": stores_json})
    else:
        _print(results)
    raise SystemExit(1 if any(result.damaged for result in results) else 0)


def _one(store: Store, rate: int, key_file: str, check_only: bool, bar: Progress) -> Scrubbed:
    from offload.scrub import Pace, repair, scrub
    from offload.sizes import parse_size

    owner = store.owner()
    if rate < 0:
        rate = parse_size(LIVE_RATE) if owner else 0
    outside = store.open(key_file)
    try:
        total = sum(record.stored_bytes for batch in outside.batches() for record in batch)
        task = bar.add_task(f"{store.folder.name}", total=total)
        result = scrub(
            store,
            outside,
            has_key=bool(key_file),
            pace=Pace(rate),
            advance=lambda count: bar.advance(task, count),
        )
    finally:
        outside.close()
    if not check_only:
        repair(result, key_file)
    elif owner is not None:
        result.owner_pid = owner.pid
    return result


def _print(results: list[Scrubbed]) -> None:
    from rich.table import Table

    table = Table()
    columns = ("namespace", "replica/rank", "records", "read", "good", "gone meanwhile")
    for place, name in enumerate((*columns, "not read", "damaged", "removed")):
        table.add_column(name, justify="left" if place < 2 else "right")
    for result in results:
        store = result.store
        counts = (result.good, result.gone, result.unread, len(result.damaged), result.removed)
        table.add_row(
            store.namespace[:12],
            f"{store.replica}/{store.rank}",
            f"{result.records:,}",
            size_text(result.read_bytes),
            *(f"{count:,}" for count in counts),
        )
    out = screen()
    out.print(table)
    for result in results:
        for line in _remarks(result):
            out.print(line, markup=False)


def _remarks(result: Scrubbed) -> list[str]:
    place = str(result.store.folder)
    lines = [f"{place}: damaged: key {found.key.hex()}" for found in result.damaged[:SHOWN_MAX]]
    if len(result.damaged) > SHOWN_MAX:
        lines.append(f"{place}: and {len(result.damaged) - SHOWN_MAX:,} more (--json has all)")
    if result.damaged and result.owner_pid is not None:
        lines.append(
            f"{place}: pid {result.owner_pid} uses it, so nothing was removed: it drops a damaged "
            "record when it next reads it. Run this again once it has stopped to remove them"
        )
    if result.unread:
        lines.append(f"{place}: {result.unread:,} encrypted records were not read: give --key-file")
    return lines

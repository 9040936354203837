"""``kvtiers clear``: removes namespaces, or records that have not been used for a long time."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    Folder,
    Problems,
    confirm,
    guarded_work,
    make_app,
    print_json,
    progress_bar,
    screen,
)
from offload.cli.numbers import age_text, size_text

if TYPE_CHECKING:
    from offload.admin.clear import Removal, RemovalFilter
    from offload.namespaces.inventory import NamespaceFolder

app = make_app()

LIVE = (
    "in use by pid {pids}: {what}. To empty the tiers of a running server, call its POST "
    "/reset_prefix_cache?reset_external=true; to remove the files, stop the server first"
)
LIVE_SHARED = (
    "shared by pid {pids}: {what}. A reset would not empty it, and the server that resets "
    "would not share its blocks until it restarts. To remove the files, stop all of these servers "
    "first"
)


AGAIN = "It counts towards the capacity. Fix the cause and run this again"


@app.command()
def clear(
    folder: Folder,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Beginning of a namespace's name. Repeatable.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model's name. Repeatable.")] = None,
    unused_for: Annotated[
        str,
        typer.Option(
            help=(
                "Only data that was last used longer ago than this, e.g. 12h or 30d: whole "
                "namespaces, or single records of a namespace."
            )
        ),
    ] = "",
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Only folders that were moved aside as damaged.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Everything below the path.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove namespaces by name, model or age; what a running server uses stays.

    If several kinds of options are given, data must match each kind. Works while servers run on
    other namespaces of the same path. Deletions that failed in an earlier run are tried again.
    Exits with 1 if something remains because it is in use or could not be deleted.
    """
    from offload.admin.clear import RemovalFilter, find_removals, remove

    problems = Problems()
    age_s = problems.duration("--unused-for", unused_for)
    namespaces = problems.namespaces(folder)
    before_ns = int((time.time() - age_s) * 1e9) if age_s else 0
    wanted = RemovalFilter(tuple(namespace or ()), tuple(model or ()), before_ns, set_aside)
    _check(problems, wanted, namespaces, everything, unused_for)
    if not (yes or dry_run) and (as_json or sys.stdin is None or not sys.stdin.isatty()):
        why = "with --json" if as_json else "because there is no terminal to ask on"
        problems.add("--yes", f"is required {why}", "Add --yes, or --dry-run to look first.")
    problems.refuse("clear")
    with guarded_work("clear"):
        removals = find_removals(namespaces, wanted)
        if not as_json:
            _print_removals(removals)
        if not dry_run and any(not removal.owners for removal in removals):
            if not yes and not confirm("Remove this?"):
                raise SystemExit(1)
            with progress_bar(is_bytes=False) as bar:
                task = bar.add_task("removing", total=len(removals))
                remove(removals, before_ns, lambda count: bar.advance(task, count))
    _report(removals, str(folder), dry_run, as_json)


def _check(
    problems: Problems,
    wanted: RemovalFilter,
    namespaces: list[NamespaceFolder],
    everything: bool,
    unused_for: str,
) -> None:
    """Check for names that match nothing, and for missing options."""
    chosen = wanted.names or wanted.models or unused_for or wanted.set_aside
    if not chosen and not everything:
        fix = "Give --namespace, --model, --unused-for, --set-aside or --all; --dry-run to look."
        problems.add("what to remove", "is missing", fix)
    if not namespaces:
        return
    names = [namespace.name for namespace in namespaces if not namespace.is_trash]
    models = sorted({namespace.model for namespace in namespaces if namespace.model})
    for name in wanted.names:
        if not any(known.startswith(name) for known in names) or not name:
            problems.add(
                "--namespace", f'matches nothing (got "{name}")', f"Known: {_list(names)}."
            )
    for name in wanted.models:
        if name not in models:
            problems.add("--model", f'matches nothing (got "{name}")', f"Known: {_list(models)}.")
    if names == [""] and not unused_for:
        fix = "Delete the folder when nothing uses it, or give --unused-for."
        problems.add(str(namespaces[0].folder), "is the folder of a single tier", fix)


def _list(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "none"


def _print_removals(removals: list[Removal]) -> None:
    from policies.simulation.tables import FittingTable

    if not removals:
        print("nothing matches these options")
        return
    headings = ("namespace", "model", "what", "size", "last used", "in use by")
    table = FittingTable(headings, right=("size", "last used"))
    for removal in removals:
        what = f"{sum(removal.old.values()):,} records" if removal.old else "everything"
        what = "damaged files set aside" if removal.aside else what
        what = "remains of a removal" if removal.namespace.is_trash else what
        pids = sorted({str(owner.pid) for owner in removal.owners})
        table.add_row(
            removal.namespace.name,
            removal.namespace.model,
            what,
            size_text(removal.size_bytes),
            f"{age_text(int(removal.last_used_s * 1e9))} ago",
            f"pid {', '.join(pids)}: kept" if pids else "",
        )
    screen().print(table)


def _kept_text(removal: Removal) -> str:
    """Describe how much of a removal was done before a server used the namespace."""
    if removal.removed_records:
        planned = sum(removal.old.values())
        return f"only {removal.removed_records:,} of {planned:,} records removed"
    return "not removed"


def _report(removals: list[Removal], folder: str, dry_run: bool, as_json: bool) -> None:
    """Report what was done, and end the program."""
    kept = [removal for removal in removals if removal.owners and not removal.done]
    stuck = [removal for removal in removals if removal.problem]
    if as_json:
        found = [removal.to_json() for removal in removals]
        print_json({"folder": folder, "dry_run": dry_run, "namespaces": found})
    else:
        done = [removal for removal in removals if removal.done]
        if done:
            size = size_text(sum(removal.size_bytes for removal in done))
            print(f"removed {size} in {len(done)} of {len(removals)} namespaces")
        for removal in stuck:
            print(f"{removal.problem}. {AGAIN}", file=sys.stderr)
        for removal in kept:
            pids = ", ".join(sorted({str(owner.pid) for owner in removal.owners}))
            is_shared = any(rank_folder.members() for rank_folder in removal.namespace.rank_folders)
            line = (LIVE_SHARED if is_shared else LIVE).format(pids=pids, what=_kept_text(removal))
            print(
                f"{removal.namespace.name or removal.namespace.folder}: {line}",
                file=sys.stderr,
            )
    raise SystemExit(1 if kept or stuck else 0)

"""``kvtiers verify``: reads and checks every record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    Folder,
    KeyFile,
    Problems,
    ReadRate,
    guarded_work,
    make_app,
    print_json,
    print_line,
    progress_bar,
    rate_limit,
    screen,
)
from offload.cli.numbers import size_text

if TYPE_CHECKING:
    from rich.progress import Progress

    from offload.admin.verify import VerifyResult
    from offload.namespaces.inventory import RankFolder

app = make_app()

REMARK_LINES_MAX = 20
"""Maximum number of lines below the table, for all folders together; remarks about a whole folder
come first."""


@app.command()
def verify(
    folder: Folder,
    rate: ReadRate = "",
    check_only: Annotated[bool, typer.Option("--check-only", help="Remove nothing.")] = False,
    key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Read every record and check it against its checksum, key, namespace and epoch.

    Removes damaged records if no server uses the folder. A running server drops them itself when it
    reads them, and recomputes the prompt. Exits with 1 if anything was damaged, or if the next
    server to start would not use the records.
    """
    from offload.namespaces.inventory import Standing

    problems = Problems()
    bytes_per_s = problems.size("--rate", rate, -1)
    namespaces = problems.namespaces(folder)
    problems.key_file(key_file)
    problems.refuse("verify")
    with guarded_work("verify"), progress_bar(is_bytes=True) as bar:
        namespaces = [namespace for namespace in namespaces if namespace.is_served]
        results = [
            _verify_folder(rank_folder, bytes_per_s, key_file, check_only, bar)
            for namespace in namespaces
            for rank_folder in namespace.rank_folders
        ]
    results = [result for result in results if result.standing != Standing.EMPTY.value]
    faulty = {namespace.name: namespace.problem for namespace in namespaces if namespace.problem}
    has_wrong_key = bool(key_file) and any(result.unread for result in results)
    ok = not (faulty or has_wrong_key) and all(result.is_ok for result in results)
    if as_json:
        found = [result.to_json() for result in results]
        print_json({"folder": str(folder), "ok": ok, "rank_folders": found, "namespaces": faulty})
    else:
        broken = [f"{folder / name}: {problem}" for name, problem in faulty.items()]
        _print(results, broken, key_file)
    raise SystemExit(0 if ok else 1)


def _verify_folder(
    rank_folder: RankFolder, rate: int, key_file: str, check_only: bool, bar: Progress
) -> VerifyResult:
    """Check one rank folder. An error does not prevent the others from being checked."""
    from offload.admin.verify import VerifyResult, repair
    from tiers.base import TierError
    from tiers.offline.offline_folder import FolderChangedError

    result = VerifyResult(rank_folder)
    try:
        _scrub(result, rate, key_file, bar)
    except FolderChangedError as error:
        result.fail(f"{error} while the folder was read: run this again")
    except (OSError, TierError) as error:
        result.fail(str(error))
    if check_only:
        result.note_owner()
        return result
    try:
        repair(result, key_file)
    except (OSError, TierError) as error:
        result.fail(str(error))
    return result


def _scrub(result: VerifyResult, rate: int, key_file: str, bar: Progress) -> None:
    from offload.admin.verify import scrub

    rank_folder = result.rank_folder
    limit = rate_limit(rate, is_used=rank_folder.owner() is not None)
    verdict, reader = rank_folder.judge(key_file)
    result.judge(verdict)
    if reader is None:
        return
    try:
        total = sum(record.stored_bytes for batch in reader.batches() for record in batch)
        task = bar.add_task(f"{rank_folder.folder.name}", total=total)
        scrub(
            result,
            reader,
            rate_limit=limit,
            advance=lambda count: bar.advance(task, count),
        )
    finally:
        reader.close()


def _print(results: list[VerifyResult], problems: list[str], key_file: str) -> None:
    from policies.simulation.tables import FittingTable

    numbers = ("records", "read", "good", "gone meanwhile", "not read", "damaged", "removed")
    table = FittingTable(("namespace", "replica/rank", *numbers), right=numbers)
    for result in results:
        rank_folder = result.rank_folder
        counts = (result.good, result.gone, result.unread, len(result.damaged), result.removed)
        table.add_row(
            rank_folder.namespace[:12],
            f"{rank_folder.replica}/{rank_folder.rank}",
            f"{result.records:,}",
            size_text(result.read_bytes),
            *(f"{count:,}" for count in counts),
        )
    out = screen()
    out.print(table)
    lines = [line for result in results for line in _remarks(result, key_file)] + problems
    lines += [line for result in results for line in _damaged(result)]
    for line in lines[:REMARK_LINES_MAX]:
        print_line(out, line)
    if len(lines) > REMARK_LINES_MAX:
        out.print(f"and {len(lines) - REMARK_LINES_MAX:,} more lines (--json has everything)")


def _damaged(result: VerifyResult) -> list[str]:
    return [
        f"{result.rank_folder.folder}: damaged: key {found.key.hex()}" for found in result.damaged
    ]


def _remarks(result: VerifyResult, key_file: str) -> list[str]:
    folder = str(result.rank_folder.folder)
    lines = [f"{folder}: {text}" for text in (result.problem, result.remark) if text]
    if result.damaged and result.owner_pid is not None:
        lines.append(
            f"{folder}: pid {result.owner_pid} uses it, so nothing was removed: that process drops "
            f"a damaged record when it next reads the record. To remove them all, stop it and run "
            f"this again"
        )
    if result.unread:
        why = f"{key_file} does not have their key" if key_file else "give --key-file"
        lines.append(f"{folder}: {result.unread:,} encrypted records were not read: {why}")
    return lines

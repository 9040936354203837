"""``kvtiers import``: writes the records of an export into a tier's path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    KeyFile,
    Problems,
    folder_path,
    give_up,
    guarded_work,
    make_app,
    print_json,
    progress_bar,
)
from offload.cli.numbers import size_text

if TYPE_CHECKING:
    from offload.admin.import_ import Import, Imported, Target

app = make_app()


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An export.")],
    folder: Annotated[
        Path,
        typer.Argument(parser=folder_path, help="Path of a tier; created if it does not exist."),
    ],
    capacity: Annotated[
        str,
        typer.Option(
            help=(
                "Capacity of the folder of one rank, e.g. 200GiB. (default: the capacity that it "
                "was created with)"
            )
        ),
    ] = "",
    type: Annotated[
        str,
        typer.Option(
            help="lmdb or file. (default: the type of the existing folder or of the export)"
        ),
    ] = "",
    key_file: KeyFile = "",
    compress: Annotated[bool, typer.Option("--compress", help="Compress the records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the records of an export into a tier's folder that no server uses.

    Namespace and type must equal those in the folder; a missing folder is created. A folder that
    was reset receives only records of the same epoch. Every record is checked; damaged ones are
    left out. Exits with 1 if not everything could be imported.
    """
    from offload.admin.import_ import KINDS, Target
    from offload.cli.path_hints import not_a_folder

    problems = Problems()
    capacity_bytes = problems.size("--capacity", capacity, is_positive=True)
    if type and type not in KINDS:
        problems.add("--type", f'is unknown (got "{type}")', "Use lmdb or file.")
    problems.file(file, "Name a file that kvtiers export wrote.")
    problems.key_file(key_file)
    if about := not_a_folder(folder):
        problems.add(str(folder), *about)
    else:
        _check_folder(problems, folder.absolute())
    problems.refuse("import")
    target = Target(folder.absolute(), type, capacity_bytes, key_file, compress)
    with guarded_work("import"):
        source, found = _import_file(file, target)
    _report(source, found, as_json)


def _check_folder(problems: Problems, folder: Path) -> None:
    """Add a problem if the path cannot be a tier's path."""
    from offload.config.path_checks import path_problem
    from offload.namespaces.inventory import RankFolder
    from offload.namespaces.manifest import NAME

    above = "Give the tier's path above it, as in tiers[].path of the configuration."
    if any(NAME.fullmatch(path.name) for path in (folder, *folder.parents[:2])):
        problems.add(str(folder), "is a namespace, or is inside one", above)
    elif os.path.lexists(folder) and not os.path.isdir(folder):
        problems.add(str(folder), "is not a folder", "Give the path of a tier.")
    elif RankFolder(folder).kind != "empty":
        fix = "Give another path: the target must be a tier's path, which contains namespaces."
        problems.add(str(folder), "is the folder of a single tier", fix)
    elif found := path_problem(folder):
        what, fix = found
        problems.add(str(folder), what.removeprefix(f"{folder} "), fix)


def _import_file(file: Path, target: Target) -> tuple[Import, list[Imported]]:
    from offload.admin.import_ import Import
    from offload.errors import NamespaceError

    with file.open("rb") as opened, progress_bar(is_bytes=True) as bar:
        task = bar.add_task("import", total=file.stat().st_size)
        try:
            source = Import(opened, target, lambda count: bar.advance(task, count))
        except NamespaceError as error:
            give_up("import", f"{file}: {error}")
        return source, source.run()


def _report(source: Import, found: list[Imported], as_json: bool) -> None:
    """Report what was imported, and end the program."""
    complete = all(one.is_complete for one in found)
    complete = complete and not (source.problem or source.damaged_frames)
    if as_json:
        print_json({
            "namespace": source.namespace.name, "complete": complete, "problem": source.problem,
            "lost_frames": source.damaged_frames, "rank_folders": [one.to_json() for one in found],
        })  # fmt: skip
    else:
        for one in found:
            print(_line(one), file=sys.stderr if one.refused else sys.stdout)
        if source.damaged_frames:
            print(f"{source.damaged_frames:,} damaged parts of the file were skipped")
        if source.problem:
            line = f"the file could not be read to its end: {source.problem}"
            print(line, file=sys.stderr)
    raise SystemExit(0 if complete else 1)


def _line(one: Imported) -> str:
    rank = f"replica {one.replica} rank {one.rank}"
    if one.refused:
        return f"{rank}: nothing imported: {one.refused}"
    counts = one.counts
    line = f"{rank}: imported {counts.written:,} records ({size_text(counts.written_bytes)})"
    more = {"already present": counts.present, "damaged": one.damaged,
            "did not fit into the capacity or onto the disk": one.left,
            "could not be written": counts.failed}  # fmt: skip
    return line + "".join(f", {count:,} {why}" for why, count in more.items() if count)

"""``kvtiers export``: writes the records of a namespace to one file."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.common import (
    AsJson,
    Folder,
    KeyFile,
    Problems,
    ReadRate,
    give_up,
    guarded_work,
    make_app,
    print_json,
    progress_bar,
    rate_limit,
)
from offload.cli.numbers import size_text

if TYPE_CHECKING:
    from offload.admin.export import Exported
    from offload.namespaces.inventory import NamespaceFolder

app = make_app()


@app.command()
def export(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="File to write.")],
    namespace: Annotated[str, typer.Option(help="Beginning of the namespace's name.")] = "",
    model: Annotated[str, typer.Option(help="Model's name.")] = "",
    rate: ReadRate = "",
    key_file: KeyFile = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write all records of one namespace to a file and verify each; works while a server uses the
    namespace.

    The file is neither encrypted nor compressed, and only its owner can read it. Exits with 1 if
    damaged records, or encrypted ones without their key, had to be left out.
    """
    problems = Problems()
    bytes_per_s = problems.size("--rate", rate, -1)
    namespaces = problems.namespaces(folder)
    chosen = _choose(problems, namespaces, namespace, model)
    problems.key_file(key_file)
    if file.is_dir() or not file.parent.is_dir():
        fix = "Name a file in a folder that exists."
        problems.add(str(file), "is a folder, or its folder does not exist", fix)
    elif file.exists() and not file.is_file():
        problems.add(str(file), "is not a regular file", "Name a file that can be replaced.")
    elif file.exists() and not overwrite:
        problems.add(str(file), "exists", "Name another file, or give --overwrite.")
    problems.refuse("export")
    assert chosen is not None
    with guarded_work("export"):
        found = _write(chosen, file, overwrite, bytes_per_s, key_file)
    _report(chosen, file, found, key_file, as_json)


def _choose(
    problems: Problems, namespaces: list[NamespaceFolder], namespace: str, model: str
) -> NamespaceFolder | None:
    """Return the one namespace that matches; add a problem if none or several do."""
    fitting = [
        chosen
        for chosen in namespaces
        if chosen.name.startswith(namespace) and (not model or chosen.model == model)
    ]
    if len(fitting) == 1:
        [chosen] = fitting
        if chosen.problem or not chosen.name:
            what = chosen.problem or (
                "has no manifest, so it is unknown which model its records belong to"
            )
            problems.add(
                str(chosen.folder),
                what,
                "Only namespaces with a readable manifest can be exported.",
            )
        return chosen
    if namespaces:
        known = ", ".join(
            f"{chosen.name} ({chosen.model or 'unknown'})" for chosen in namespaces[:10]
        )
        if fitting:
            what = f"{len(fitting)} of them match"
            problems.add("namespace", what, f"Give --namespace. Known: {known}.")
        else:
            given = {"--namespace": namespace, "--model": model}
            where = " with ".join(f'{name} "{text}"' for name, text in given.items() if text)
            problems.add(where, "matches nothing", f"Known: {known}.")
    return None


def _write(
    chosen: NamespaceFolder, file: Path, overwrite: bool, rate: int, key_file: str
) -> list[Exported]:
    from offload.admin.export import (
        ExportFileError,
        export_file,
        export_namespace,
        weights_problem,
    )

    limit = rate_limit(rate, is_used=bool(chosen.owners()))
    with contextlib.ExitStack() as undo:
        rank_folders = []
        for rank_folder in chosen.rank_folders:
            verdict, reader = rank_folder.judge(key_file)
            problem = verdict.problem
            if reader is not None:
                rank_folders.append((rank_folder, reader))
                undo.callback(reader.close)
                problem = problem or weights_problem(rank_folder, reader)
            if problem:
                give_up("export", f"{rank_folder.folder}: {problem}")
        total = sum(
            r.stored_bytes for _, out in rank_folders for batch in out.batches() for r in batch
        )
        try:
            out = undo.enter_context(export_file(file, overwrite=overwrite))
        except ExportFileError as error:
            give_up("export", str(error))
        bar = undo.enter_context(progress_bar(is_bytes=True))
        task = bar.add_task("export", total=total)
        return export_namespace(
            chosen,
            rank_folders,
            out,
            rate_limit=limit,
            advance=lambda count: bar.advance(task, count),
        )


def _report(
    chosen: NamespaceFolder, file: Path, found: list[Exported], key_file: str, as_json: bool
) -> None:
    """Report what was written, and end the program."""
    lacking = sum(one.damaged + one.unread for one in found)
    if as_json:
        rank_folders = [asdict(one) for one in found]
        print_json({"namespace": chosen.name, "model": chosen.model, "file": str(file),
                    "file_bytes": file.stat().st_size, "rank_folders": rank_folders})  # fmt: skip
    else:
        records = sum(one.records for one in found)
        size = size_text(sum(one.payload_bytes for one in found))
        print(f"{records:,} records ({size}) of {chosen.name} {chosen.model} in {file}")
        sealed = (
            f"whose key {key_file} does not have" if key_file else "encrypted (give --key-file)"
        )
        for one in found:
            left = {"damaged": one.damaged, "removed meanwhile": one.gone, sealed: one.unread}
            for why, count in left.items():
                if count:
                    print(f"replica {one.replica} rank {one.rank}: left out {count:,} {why}")
    raise SystemExit(1 if lacking else 0)

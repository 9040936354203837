"""Commands of a user who may not read the server's files report that, instead of reporting an empty
folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.offload.cli.rank_folders import kvtiers, make_rank_folder

NOBODY = 65_534


@contextlib.contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Act as a user without any access to this folder, until the end of the block."""
    is_root = os.geteuid() == 0
    folder.chmod(0o700 if is_root else 0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "FOLDER"),
        ("verify", "FOLDER"),
        ("clear", "FOLDER", "--all", "--dry-run"),
        ("export", "FOLDER", "FILE"),
    ],
    ids=lambda words: words[0],
)
def test_an_unreadable_store_is_not_called_empty(
    words: tuple[str, ...], inside: bool, public_folder: Path
) -> None:
    """The path itself is unreadable, or a folder above it."""
    root = public_folder / "above" / "kv"
    root.parent.mkdir(0o755)
    make_rank_folder(root, range(2))
    paths = {"FOLDER": root, "FILE": public_folder / "blocks.kvt"}
    command = [paths.get(word, word) for word in words]
    assert kvtiers(*command).code == 0  # which also imports what the command needs
    (public_folder / "blocks.kvt").unlink(missing_ok=True)
    with without_rights(root.parent if inside else root):
        result = kvtiers(*command)
    assert result.code == 2, result.err
    assert "is not readable by this user. Run this as the user that the server" in result.err
    assert not result.out


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_read_only_folder_is_not_called_damaged(command: str, public_folder: Path) -> None:
    """LMDB enters each reader into a table, so a reader needs the right to write one file."""
    folder = make_rank_folder(public_folder / "kv", range(2))
    words = [command, public_folder / "kv", *([public_folder / "f"] if command == "export" else [])]
    assert kvtiers(*words).code == 0  # which also imports what the command needs
    (public_folder / "f").unlink(missing_ok=True)
    public_folder.chmod(0o777)
    for path in (public_folder / "kv", *(public_folder / "kv").rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    (folder / "lock.mdb").chmod(0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        result = kvtiers(*words)
    finally:
        if is_root:
            os.seteuid(0)
    assert result.code == 1
    said = result.out + result.err
    assert "lock.mdb, in which LMDB enters each reader. Run this as the user" in said
    assert "damaged: " not in said
    assert "is damaged" not in said


def test_an_unreadable_export_is_reported(public_folder: Path) -> None:
    make_rank_folder(public_folder / "kv", range(2))
    closed = public_folder / "closed"
    closed.mkdir()
    assert kvtiers("export", public_folder / "kv", closed / "blocks.kvt").code == 0
    with without_rights(closed):
        result = kvtiers(
            "import", closed / "blocks.kvt", public_folder / "b", "--capacity", "64MiB"
        )
    assert result.code == 2, result.err
    assert "is not readable by this user" in result.err


def test_a_folder_of_another_user_is_cleared_as_that_user(public_folder: Path) -> None:
    """An operator may run the command as root, and has no other folder to use."""
    root = public_folder / "kv"
    make_rank_folder(root, range(2))
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(root, NOBODY, -1)
    result = kvtiers("clear", root, "--all", "--yes")
    assert result.code == 1
    assert f"{root} belongs to user {NOBODY}, but" in result.err
    assert f"Run this as user {NOBODY}, or use a folder of this user" in result.err

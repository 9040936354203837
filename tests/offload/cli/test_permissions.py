"""Commands of a user who may not read the server's files report that, instead of reporting an empty
store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.offload.cli.stores import kvtiers, make_store

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
        ("inspect", "STORE"),
        ("verify", "STORE"),
        ("clear", "STORE", "--all", "--dry-run"),
        ("export", "STORE", "FILE"),
    ],
    ids=lambda words: words[0],
)
def test_an_unreadable_store_is_not_called_empty(
    words: tuple[str, ...], inside: bool, place: Path
) -> None:
    """The path itself is unreadable, or a folder above it."""
    root = place / "above" / "kv"
    root.parent.mkdir(0o755)
    make_store(root, range(2))
    paths = {"STORE": root, "FILE": place / "blocks.kvt"}
    command = [paths.get(word, word) for word in words]
    assert kvtiers(*command).code == 0  # which also imports what the command needs
    (place / "blocks.kvt").unlink(missing_ok=True)
    with without_rights(root.parent if inside else root):
        result = kvtiers(*command)
    assert result.code == 2, result.err
    assert "may not be read by this user. Run this as the user that the server" in result.err
    assert not result.out


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_read_only_store_is_not_called_damaged(command: str, place: Path) -> None:
    """LMDB enters each reader into a table, so a reader needs the right to write one file."""
    folder = make_store(place / "kv", range(2))
    words = [command, place / "kv", *([place / "f"] if command == "export" else [])]
    assert kvtiers(*words).code == 0  # which also imports what the command needs
    (place / "f").unlink(missing_ok=True)
    place.chmod(0o777)
    for path in (place / "kv", *(place / "kv").rglob("*")):
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
    assert "lock.mdb may not be written by this user" in said
    assert "damaged: " not in said
    assert "is damaged" not in said


def test_an_unreadable_export_is_reported(place: Path) -> None:
    make_store(place / "kv", range(2))
    closed = place / "closed"
    closed.mkdir()
    assert kvtiers("export", place / "kv", closed / "blocks.kvt").code == 0
    with without_rights(closed):
        result = kvtiers("import", closed / "blocks.kvt", place / "b", "--capacity", "64MiB")
    assert result.code == 2, result.err
    assert "may not be read by this user" in result.err

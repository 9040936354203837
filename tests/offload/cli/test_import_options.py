"""Wrong options of ``kvtiers import`` are reported before anything is created or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offload.cli.rank_folders import kvtiers, make_rank_folder, rank_folder_of


@pytest.fixture
def export(tmp_path: Path) -> Path:
    make_rank_folder(tmp_path / "a", range(3))
    assert kvtiers("export", tmp_path / "a", tmp_path / "f").code == 0
    return tmp_path / "f"


@pytest.mark.parametrize("option", ["--compress", "--key-file"])
@pytest.mark.parametrize("there", [False, True])
def test_a_file_tier_does_not_store_encrypted_records_unencrypted(
    export: Path, tmp_path: Path, option: str, there: bool
) -> None:
    key = tmp_path / "key"
    key.write_text("cd" * 32)
    key.chmod(0o600)
    if there:
        make_rank_folder(tmp_path / "b", range(7, 9), kind="file")
    options = [option, *([key] if option == "--key-file" else [])]
    words = ["--type", "file", "--capacity", "24MiB", *options]
    result = kvtiers("import", export, tmp_path / "b", *words, "--json")
    [found] = result.json["rank_folders"]
    assert (result.code, found["written"], found["left"]) == (1, 0, 3)
    assert "encrypt" in found["refused"]
    assert there or not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["import", "export", "verify"])
def test_a_missing_key_file_is_reported(export: Path, tmp_path: Path, command: str) -> None:
    words = {"import": [export, tmp_path / "b", "--capacity", "24MiB"],
             "export": [tmp_path / "a", tmp_path / "g"], "verify": [tmp_path / "a"]}  # fmt: skip
    result = kvtiers(command, *words[command], "--key-file", tmp_path / "no")
    assert (result.code, result.out) == (2, "")
    assert f"kvtiers {command}: {tmp_path}/no: does not exist" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "f"]


def test_a_folder_that_is_not_a_tiers_path_is_refused(export: Path, tmp_path: Path) -> None:
    rank = rank_folder_of(tmp_path / "a")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for folder, words in (
        (rank, "is a namespace, or is inside one"),
        (rank.parent.parent, "is a namespace, or is inside one"),
        (export, "is not a folder"),
    ):
        result = kvtiers("import", export, folder, "--capacity", "24MiB")
        assert (result.code, result.out) == (2, "")
        assert f"kvtiers import: {folder}: {words}" in result.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    rank.rename(tmp_path / "single")
    result = kvtiers("import", export, tmp_path / "single", "--capacity", "24MiB")
    assert (result.code, "is the folder of a single tier" in result.err) == (2, True)


def test_records_without_space_are_counted_with_both_causes(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "a", range(40))
    assert kvtiers("export", tmp_path / "a", tmp_path / "f").code == 0
    words = ("--type", "file", "--capacity", "200KiB")
    result = kvtiers("import", tmp_path / "f", tmp_path / "b", *words)
    assert result.code == 1
    assert " did not fit into the capacity or onto the disk\n" in result.out

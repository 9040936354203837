"""Paths that a tier must not use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.config.machine_checks import load_config
from offload.config.path_checks import location_problem, path_problem
from offload.errors import ConfigError
from tests.offload.cli.rank_folders import kvtiers, make_rank_folder
from tests.offload.config.test_machine_checks import extra, problems_of, tier
from tests.offload.worker.reopening_child import places
from tiers.folders.folder import FolderError, prepare


def said(path: Path | str) -> str:
    """The message of the configuration's check about a tier's path; empty if the check passes."""
    return problems_of(tier(path)).get("$.tiers[0].path", "")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/", "is a system folder"),
        ("/etc", "belongs to the system"),
        ("/etc/kvtiers", "belongs to the system"),
        ("/usr/lib/kv", "belongs to the system"),
        ("/dev", "belongs to the system"),
        ("/tmp", "is a system folder"),
        ("/var/cache", "is a system folder"),
        ("/home/somebody", "is a home folder"),
    ],
)
def test_system_folders_are_refused(path: str, words: str) -> None:
    assert words in said(path)
    assert "Give the tier its own empty folder, for example /" in said(path)
    with pytest.raises(ConfigError):
        load_config(extra(tier(path)))


@pytest.mark.parametrize("path", ["/var/cache/kv", "/dev/shm/kv", "/mnt/nvme0", "/srv/kv/a"])
def test_ordinary_paths_are_accepted(path: str) -> None:
    assert location_problem(path) is None


def test_a_home_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "is a home folder" in said(tmp_path)
    assert said(tmp_path / "kv") == ""


@pytest.mark.parametrize("weights", ["model-00001.safetensors", "model.gguf", "pytorch_model.bin"])
def test_a_models_folder_is_refused(tmp_path: Path, weights: str) -> None:
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert "lies in the folder of a model" not in said(model / "kv")
    (model / weights).write_bytes(b"")
    assert f"{model} is the folder of a model" in said(model)
    assert f"lies in the folder of a model ({model})" in said(model / "cache" / "kv")
    link = tmp_path / "link"
    link.symlink_to(model)
    assert f"lies in the folder of a model ({model})" in said(link / "kv")


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    assert said(folder) == ""
    (folder / "lost+found").mkdir()
    assert said(folder) == "", "the root of a separate disk"
    for number in range(5):
        (folder / f"notes-{number}").touch()
    text = said(folder)
    assert (
        "is not empty, and contains no kvtiers data: notes-0, notes-1, notes-2 and 2 more" in text
    )
    assert f"for example {folder / 'kvtiers'}" in text
    assert said(folder / "kvtiers") == ""


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_a_former_tiers_folder_is_accepted(tmp_path: Path, kind: str) -> None:
    """Other content does not matter, even if everything of the tier was cleared."""
    folder = tmp_path / "kv"
    [spec] = places(folder, type=kind).specs()
    assert spec.claim is not None
    spec.claim.close()
    (folder / "notes").touch()
    assert path_problem(folder) is None
    assert kvtiers("clear", folder, "--all", "--yes").code == 0
    assert sorted(os.listdir(folder)) == [".kvtiers.lock", "notes"]
    assert path_problem(folder) is None


def test_an_import_refuses_the_same_paths(tmp_path: Path) -> None:
    make_rank_folder(tmp_path / "kv", range(2))
    assert kvtiers("export", tmp_path / "kv", tmp_path / "blocks.kvt").code == 0
    result = kvtiers("import", tmp_path / "blocks.kvt", "/etc", "--capacity", "64MiB")
    assert (result.code, "belongs to the system" in result.err) == (2, True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    result = kvtiers("import", tmp_path / "blocks.kvt", tmp_path / "other", "--capacity", "64MiB")
    assert (result.code, "contains no kvtiers data: notes" in result.err) == (2, True)


@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_a_link_that_leads_nowhere_is_reported_before_the_start(
    tmp_path: Path, target: str
) -> None:
    """A server could not create a folder behind it, neither a dangling link nor a loop."""
    link = tmp_path / "link"
    link.symlink_to(target)
    words = f"cannot create {link / 'a' / 'kv'}: {link} is a symbolic link that leads nowhere"
    assert words in said(link / "a" / "kv")
    (tmp_path / "nowhere").mkdir()
    assert (said(link / "a" / "kv") == "") == (target == "nowhere")


def test_the_folder_for_digests_is_checked_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    for path, words in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "digests", f"{tmp_path / 'file'} is a file"),
        (Path("/proc/digests"), "cannot create /proc/digests: "),
    ):
        with pytest.raises(ConfigError, match=r"\$\.verify_path: ") as refused:
            load_config(extra() | {"verify": "device", "verify_path": str(path)})
        assert words in str(refused.value)
        load_config(extra() | {"verify_path": str(path)})  # it is not used
    for path in (tmp_path / "here", tmp_path / "new" / "digests"):
        load_config(extra() | {"verify": "device", "verify_path": str(path)})
    assert sorted(os.listdir(tmp_path)) == ["file", "here"]


def test_a_link_of_another_user_on_the_way_is_reported_before_the_start(tmp_path: Path) -> None:
    """A server refuses it when it opens the tier."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a link to another user")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert said(link / "kv") == ""
    os.lchown(link, 65_534, -1)
    with pytest.raises(FolderError, match="is a symbolic link of user 65534, who could"):
        prepare(link / "kv")
    assert f"{link} is a symbolic link of uid 65534, who could redirect it" in said(link / "kv")

"""The check of commit subjects: it finds long ones, and passes where there is no history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts import load_script

subjects = load_script("commit_subjects")

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, *texts: str) -> None:
    for text in texts:
        git(folder, "commit", "--allow-empty", "-m", text)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-b", "main")
    monkeypatch.setattr(subjects, "ROOT", folder)
    return folder


def found() -> list[str]:
    return [line.partition(" ")[2] for line in subjects.long_subjects()]


def test_only_subjects_of_recent_commits_count(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(repository, "a" * 73, *["short"] * (subjects.COMMITS - 3), "é" * 73, "b" * 72)
    assert found() == ["é" * 73, "a" * 73]
    assert subjects.main() == 1
    assert "é" * 73 in capsys.readouterr().out
    commit(repository, "one\n\n" + "c" * 80)
    assert found() == ["é" * 73]


def test_subjects_of_merges_do_not_count(repository: Path) -> None:
    commit(repository, "first")
    git(repository, "switch", "-c", "branch")
    commit(repository, "second")
    git(repository, "switch", "main")
    git(repository, "merge", "--no-ff", "branch", "-m", "m" * 73)
    assert found() == []


def test_a_shallow_clone_passes(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository, "a" * 73, "short")
    clone = repository.parent / "clone"
    git(repository.parent, "clone", "--depth=1", repository.as_uri(), str(clone))
    assert found() == ["a" * 73]
    monkeypatch.setattr(subjects, "ROOT", clone)
    assert found() == []


def test_without_history_nothing_is_checked(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert subjects.main() == 0  # no commit yet
    commit(repository, "a" * 73)
    unpacked = repository / "archive"  # an archive that was unpacked in another repository
    unpacked.mkdir()
    monkeypatch.setattr(subjects, "ROOT", unpacked)
    assert subjects.main() == 0
    monkeypatch.setattr(subjects, "ROOT", repository)
    assert subjects.main() == 1
    monkeypatch.setenv("PATH", str(unpacked))  # git is not installed
    assert subjects.main() == 0

"""``scripts/first_steps.py`` follows the guides as they are printed. The steps themselves take many
minutes and a package index."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from demo.__main__ import FOLDER
from tests.offload.cli.rank_folders import kvtiers
from tests.scripts import load_script
from tests.test_docs import ROOT


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (387.2, "6 min 27 s")]
)
def test_times_are_shown_in_minutes(seconds: float, text: str) -> None:
    assert load_script("first_steps").shown(seconds) == text


def test_a_table_has_all_steps_and_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    clock = load_script("first_steps").Clock()
    with clock.step("one"):
        pass
    clock.steps.append(("two", 61.0))
    rows = clock.table().splitlines()
    assert rows[2:] == ["| one | 0 s |", "| two | 1 min 1 s |", "| all steps | 1 min 1 s |"]
    assert "first_steps: one" in capsys.readouterr().err


def test_a_step_that_fails_is_not_in_the_table() -> None:
    clock = load_script("first_steps").Clock()
    with pytest.raises(RuntimeError), clock.step("one"):
        raise RuntimeError
    assert clock.steps == []


def test_an_active_environment_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VIRTUAL_ENV": "/v",
        "PYTHONPATH": "/work",
        "PATH": "/v/bin:/usr/bin",
    }.items():
        monkeypatch.setenv(name, value)
    found = load_script("first_steps").environment()
    assert "PYTHONPATH" not in found
    assert "VIRTUAL_ENV" not in found
    assert found["PATH"] == "/usr/bin"


def test_the_server_has_the_flags_that_the_readme_prints(tmp_path: Path) -> None:
    printed = (ROOT / "README.md").read_text(encoding="utf-8")
    disk = tmp_path / "kv"
    program, command, *words, option, port = load_script("first_steps").serve_command(
        printed, disk, 8123
    )
    assert (program, command, option, port) == ("./run", "serve", "--port", "8123")
    line = shlex.join([program, command, *words]).replace(str(disk), "/tmp/kv")
    assert f"\n{line}\n" in printed
    assert str(FOLDER.relative_to(ROOT) / "model") == words[0], "the model that the demo makes"
    found = kvtiers("serve", "m", *words[1:], "--dry-run")
    assert found.code == 0, found.err


def test_the_steps_of_the_guide_for_policies_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("first_steps")
    commands: list[list[str]] = []

    def run(*command: object, folder: Path, **_: str) -> str:
        commands.append([Path(str(command[0])).name, *map(str, command[1:])])
        return ""

    monkeypatch.setattr(script, "run", run)
    script.own_policy(ROOT, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["make_trace.py", "my_policy.py", "test_my_policy.py"]
    assert [command[0] for command in commands] == ["pytest", "python", "kvtiers"]
    assert "my_policy:MruPolicy" in commands[2]

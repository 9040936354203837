"""Every command for developers that the documentation names exists and accepts its arguments.

These are ``./run ...``, ``python ...`` and ``pytest ...`` on all pages, in the text and in blocks.
The commands of users, in the README and the guides, run in ``tests/offload/cli/test_guide.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from offload.connector.contract import snapshots
from offload.connector.contract.__main__ import main as contract
from tests.bare_checkout import copy_to, script
from tests.mutants.__main__ import choose
from tests.mutants.catalogue import load
from tests.patience import PATIENCE_S
from tests.test_docs import PAGES, ROOT, name_of, prose_of, words_of_code

ALL_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]
COMMAND = re.compile(r"((?:[A-Z_]+=\S* )*)((?:\./run|python|pytest|pip|\.ci/run)(?: .*)?)")
NOT_HERE = {
    "pip": "it needs a package index",
    "pytest -o asyncio_mode=auto test_my_tier.py": "tests/tiers/test_guide.py runs it",
    "pytest test_my_policy.py": "tests/policies/test_guide.py runs it",
    "pytest": "the program, in a sentence",
    "python -m mooncake.": "Mooncake's; tests/tiers/test_mooncake_tier.py starts it",
}
"""Commands that no test of this file tries, by how they begin, and why."""
PLACEHOLDERS = {
    "PYTEST ARGUMENTS": "tests/test_tidy.py -k files",
    "MODEL [the same flags]": "MODEL --port 8000",
    "serve ...": "serve MODEL",
    "-- ./run test": "-- true",
    "contract WHEEL": "contract installed",
}
"""Words that stand for others."""
STUBS = {
    "setup.sh": "setup() { VENV=$PWD/.venv; }\nuse_extras() { :; }\ninstall_extras() { :; }\n"
    "install_mooncake() { :; }\nfind_python() { echo python; }\nfail() { echo $*; exit 1; }",
    "versions.sh": 'setup_version() { echo "version $1"; }',
    "test.sh": 'echo "test $*"',
    "check.sh": 'echo "check"',
}
"""Scripts that take the place of those that ``./run`` sources or starts."""


def commands_of(page: Path) -> list[str]:
    """The commands in the text and in the blocks of a page, without comments."""
    text = page.read_text(encoding="utf-8")
    found = [
        " ".join(m[2].split()) for m in re.finditer(r"(`{1,2})(?!`)(.+?)\1", prose_of(page), re.S)
    ]
    for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.S | re.M):
        if kind in ("", "console"):
            lines = re.sub(r"\\\n", " ", block).splitlines()
            found += [
                re.sub(r"\s+# .*| \[.*", "", line.strip().removeprefix("$ ")) for line in lines
            ]
    return [command for command in found if COMMAND.fullmatch(command)]


FOUND = {command: name_of(page) for page in reversed(ALL_PAGES) for command in commands_of(page)}
TRIED = [
    pytest.param(command, id=f"{name}: {command}")
    for command, name in sorted(FOUND.items())
    if command not in NOT_HERE and not command.startswith(("pip ", "python -m mooncake."))
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose ``./run`` reads its arguments and starts nothing."""
    copy = copy_to(tmp_path_factory.mktemp("checkout") / "kvtiers")
    for name, body in STUBS.items():
        (copy / "scripts" / name).write_text(f"{body}\n")
    script(copy / ".venv/bin/python", 'echo "python $*"')
    return copy


@cache
def help_of(*command: str) -> str:
    """Return the text that a program of this repository prints for ``--help``."""
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(checkout: Path, words: list[str]) -> None:
    """Give the arguments to the real ``./run``, and look at what it would start."""
    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "run", *words],
        cwd=checkout,
        env={"PATH": path, "KVTIERS_VARIANT": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    program, *arguments = shlex.split(done.stdout.splitlines()[-1])
    if program == "test" and arguments[:1] != ["--all"]:
        check_selection(arguments)
    elif arguments[:2] == ["-m", "tests.mutants"]:
        check_faults(arguments[2:])


def check_selection(arguments: list[str]) -> None:
    """The paths exist, and ``-k`` selects something in them."""
    paths = [ROOT / word.partition("::")[0] for word in arguments if word.startswith("tests")]
    assert [path for path in paths if not path.exists()] == []
    if "-k" in arguments:
        word = arguments[arguments.index("-k") + 1]
        files = [
            file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])
        ]
        assert any(selects(word, file) for file in files), word


def selects(word: str, file: Path) -> bool:
    """Return whether ``-k word`` selects tests of this file."""
    return word in file.stem or bool(re.search(rf"def test_\w*{word}", file.read_text()))


def check_faults(arguments: list[str]) -> None:
    names = [word for word in arguments if not word.startswith("-") and word != "FILE"]
    choose(load(), names)
    shown = help_of("-m", "tests.mutants")
    assert [word for word in arguments if word.startswith("--") and word not in shown] == []


def run_python(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words
    if program == "-m":
        program, *arguments = arguments
        if program == "offload.connector.contract":
            run_contract(arguments, folder, monkeypatch)
            return
        if program == "pytest":
            check_selection(arguments)
            return
        found = importlib.util.find_spec(program)
        assert found is not None, program
        if program == "bench" and arguments:
            assert arguments[0] in help_of("-m", "bench"), "unknown benchmark"
    else:
        assert (ROOT / program).is_file()
        options = [word for word in arguments if word.startswith("--") and word != "--"]
        assert [word for word in options if word not in help_of(program)] == []


def run_contract(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the comparison on the installed vLLM in place of a wheel, and keep nothing."""
    monkeypatch.setattr(snapshots, "SNAPSHOTS", folder)
    for each in (ROOT / "offload/connector/contract/snapshots").iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    words = ["installed" if word.endswith(".whl") else word for word in arguments]
    assert contract(words) == 0


def test_commands_are_found_on_all_pages() -> None:
    assert len(TRIED) > 35
    for page in ("CONTRIBUTING.md", "docs/testing.md", "docs/versions.md", "README.md"):
        assert commands_of(ROOT / page), page


@pytest.mark.parametrize("command", TRIED)
def test_a_command_for_developers_is_accepted(
    command: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown, real in PLACEHOLDERS.items():
        command = command.replace(shown, real)
    match = COMMAND.fullmatch(command)
    assert match is not None
    names = re.findall(r"[A-Z_]+(?==)", match[1])
    assert [name for name in names if name not in words_of_code()] == []
    program, *words = shlex.split(match[2])
    if program == "./run":
        run_script(checkout, words)
    elif program == ".ci/run":
        assert os.access(ROOT / program, os.X_OK)
    elif program == "pytest":
        check_selection(words)
    else:
        run_python(words, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "command",
    ["./run tests", "./run test tests/no", "./run test tests/tiers -k no_such_name",
     "./run mutants no-such-fault", "./run mutants --lst", "./run test --runner v3",
     "python -m bench tires", "python scripts/no.py", "python scripts/slow_machine.py --slow 2",
     "python -m offload.connector.contract installed --against 0.1",
     "KVTIERS_NO_" + "SUCH=1 ./run test"],
)  # fmt: skip
def test_a_wrong_command_is_detected(
    command: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AssertionError, ValueError)):
        test_a_command_for_developers_is_accepted(command, checkout, tmp_path, monkeypatch)

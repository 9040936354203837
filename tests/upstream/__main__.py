"""Runs vLLM's own tests against this project.

    python -m tests.upstream                 # the tests of the installed version
    python -m tests.upstream --fetch         # only fetch them
    python -m tests.upstream --plain         # without our parts, to see what fails anyway
    python -m tests.upstream --source FILE   # with vllm-VERSION.tar.gz, without a network

vLLM's wheels contain no tests, but its source distribution does. ``chosen.toml`` says which files
run and why the others do not. They run with our parts in the place of vLLM's
(``tests.upstream.attached``). The exit code is 1 if a test fails that should pass, or if a file is
not in the list; 3 if the source distribution cannot be fetched.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.upstream.source import NoSourceError, source_of

ROOT = Path(__file__).resolve().parents[2]
CHOSEN: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("chosen.toml").read_text(encoding="utf-8")
)
FOLDERS = ("tests/v1/core/", "tests/v1/kv_connector/", "tests/v1/kv_offload/")
NOT_FOUND = "Invalid repository ID or local directory"
"""The message with which vLLM refuses a model that is not in the hub's cache."""
NOT_FETCHED = 3
TIMEOUT_S = 900
"""Deadline for a single test; each takes less than a second on an idle machine."""

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "eos_token_id": 2,
}
"""The configuration of the model whose name vLLM's helpers use; nothing is downloaded."""
MODEL = "facebook/opt-125m"


@dataclass(frozen=True)
class Outcome:
    """The result of one test: ``passed``, ``skipped``, ``failed`` or ``no model``; ``attached`` is
    true if the test used one of our parts."""

    result: str
    attached: bool


def unpack(source: Path, folder: Path) -> list[str]:
    """vLLM's tests of the scheduler and of connectors, with our ``conftest.py``. Returns the names
    of the files with tests, without ``tests/v1/``."""
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(FOLDERS) and not name.endswith("conftest.py"):
                member.name = name
                archive.extract(member, folder, filter="data")
    for package in ("tests/__init__.py", "tests/v1/__init__.py"):
        (folder / package).touch()
    shutil.copy(Path(__file__).with_name("attached.py"), folder / "conftest.py")
    (folder / MODEL).mkdir(parents=True)
    (folder / MODEL / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    tests = folder / "tests/v1"
    return sorted(path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py"))


def unlisted(files: list[str]) -> list[str]:
    """The files that ``chosen.toml`` does not name."""
    patterns = [pattern for each in CHOSEN["not_run"] for pattern in each["files"]]
    return [
        name
        for name in files
        if name not in CHOSEN["run"] and not any(fnmatch.fnmatch(name, one) for one in patterns)
    ]


def run(folder: Path, files: list[str], *, plain: bool) -> dict[str, Outcome]:
    """The outcome of each test."""
    report, log = folder / "report.xml", folder / "log"
    environment = os.environ | {
        "KVTIERS_UPSTREAM": "plain" if plain else "ours",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"--timeout={TIMEOUT_S}", "-o", "asyncio_mode=auto"]
    command += ["-n", os.environ.get("KVTIERS_TEST_WORKERS", "2")]
    command += [f"--junit-xml={report}", *(f"tests/v1/{name}" for name in files)]
    with log.open("w", encoding="utf-8") as output:
        subprocess.run(
            command, cwd=folder, env=environment, check=False, stdout=output, stderr=output
        )
    if not report.exists():
        raise RuntimeError(f"pytest has not ended:\n{log.read_text(encoding='utf-8')[-4000:]}")
    return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def outcome(case: ElementTree.Element) -> tuple[str, Outcome]:
    """The name of a test (``FILE::CLASS::NAME``) and its outcome."""
    module = case.get("classname", "").removeprefix("tests.v1.")
    path, of_class = re.fullmatch(r"(.*?test_\w+)\.?(\w*)", module).groups()
    name = "::".join(filter(None, (f"{path.replace('.', '/')}.py", of_class, case.get("name"))))
    result = "passed"
    for child in case:
        if child.tag == "skipped":
            result = "skipped"
        elif child.tag in ("failure", "error"):
            said = f"{child.get('message')} {child.text}"
            result = "no model" if NOT_FOUND in said else "failed"
    has_ours = any(one.get("name") == "ours" for one in case.iter("property"))
    return name, Outcome(result, has_ours)


def excuse(test: str) -> str | None:
    """The reason why a test cannot pass with our parts; ``None`` if it should pass."""
    for each in CHOSEN["cannot_pass"]:
        if re.search(each["tests"], test):
            return str(each["reason"])
    return None


def judge(name: str, outcomes: dict[str, Outcome], *, plain: bool) -> list[str]:
    """Print a line for a file; return what is wrong."""
    mine = {test: one for test, one in outcomes.items() if test.startswith(f"{name}::")}
    passed = [test for test, one in mine.items() if one.result == "passed"]
    failed = [test for test, one in mine.items() if one.result == "failed"]
    excused = [test for test in failed if not plain and excuse(test)]
    no_model = sum(one.result == "no model" for one in mine.values())
    attached = sum(mine[test].attached for test in passed)
    print(
        f"{name}: {len(passed)} passed, {attached} of them with our parts; {len(excused)} cannot "
        f"pass with ours; {no_model} need a model from the hub"
    )
    wrong = [f"{test} failed" for test in failed if test not in excused]
    if not attached and not plain:
        wrong.append(f"{name}: our parts took part in no test")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen files."""
    from vllm.version import __version__

    parser = argparse.ArgumentParser(prog="python -m tests.upstream")
    parser.add_argument("--fetch", action="store_true", help="only fetch the tests")
    parser.add_argument("--plain", action="store_true", help="without our parts")
    parser.add_argument("--source", type=Path, help="vllm-VERSION.tar.gz (default: downloaded)")
    options = parser.parse_args(arguments)
    version = __version__.partition("+")[0]
    try:
        source = options.source or source_of(version)
    except NoSourceError as error:
        print(f"NOT RUN: vLLM's own tests: {error}")
        return NOT_FETCHED
    if options.fetch:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="upstream-"))
    files = unpack(source, folder)
    wrong = [f"{name} is not in tests/upstream/chosen.toml" for name in unlisted(files)]
    here = [name for name in CHOSEN["run"] if name in files]
    outcomes = run(folder, here, plain=options.plain)
    for name in here:
        wrong += judge(name, outcomes, plain=options.plain)
    for line in wrong:
        print(f"FAILED: {line}")
    if wrong:
        print(f"the output is in {folder}/log")
    else:
        shutil.rmtree(folder)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

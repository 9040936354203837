"""Runs every command of the README and the guides, as printed, on a tier like the one described.

A command is the text after ``$`` in a ``console`` block. ``kvtiers`` runs as it is; ``vllm serve``
goes through ``kvtiers doctor``, which reads its flags and its configuration as vLLM does; programs
of this repository run as processes. Code of the guides runs in ``tests/policies/test_guide.py`` and
``tests/tiers/test_guide.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from demo.tiny_model import make_llama
from offload.cli import app
from offload.namespaces.manifest import Namespace
from offload.requests.request_log import LoggedRequest
from policies.simulation.trace import TraceWriter
from tests.models.inspection import inspect_models_here
from tests.offload.cli.rank_folders import FIELDS, OTHER, ROOT, kvtiers, make_rank_folder, writer
from tests.offload.cli.test_plan import alternating
from tests.offload.cli.test_top import Server, serving
from tests.patience import PATIENCE_S

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs/guides").glob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\$? ?(kvtiers|vllm|python3?|pytest|pip|\./run|scripts/\S+\.sh) ")
NOT_HERE = {
    "./run demo": "real servers, and minutes",
    "./run test": "this is part of it",
    "python scripts/gpu_box/": "needs a GPU",
    "PYTHONHASHSEED=0 vllm bench serve": "tests/vllm/test_bench_recipes.py runs them",
    "pip install --target rivals": "downloads other systems",
    "PYTHONPATH=rivals python -m bench serve": "takes half an hour",
    "docker": "needs a builder",
    "helm": "needs a cluster; tests/test_deployments.py reads the values",
    "guidellm": "it brings another torch, 6 GB with its packages",
    "aiperf": "it is not installed, and needs a tokenizer from a hub",
    "./run serve": "the flags after it are those of vllm serve",
    "kvtiers simulate trace.jsonl.gz --policy lru --policy adaptive --policy my_policy:": "its "
    "policy is the guide's: tests/policies/test_guide.py",
}


def commands_in(page: str) -> list[str]:
    """The commands of a page, each with its continuation lines."""
    blocks = [text for kind, text in BLOCK.findall(page) if kind == "console"]
    found = [command for text in blocks for command in re.split(r"^\$ ", text, flags=re.MULTILINE)]
    return [command.strip() for command in found if command.strip()]


def stray_commands(page: str) -> list[str]:
    """Commands outside console blocks, which no test would run."""
    outside = [text for kind, text in BLOCK.findall(page) if kind != "console"]
    outside += re.findall(r"^    .*$", BLOCK.sub("", page), re.MULTILINE)
    lines = [line.strip() for text in outside for line in text.splitlines()]
    return [line for line in lines if COMMAND.match(line) and not line.startswith(tuple(NOT_HERE))]


LINES = [
    pytest.param(command, id=f"{name}: {command.splitlines()[0][:60]}")
    for name, page in PAGES.items()
    for command in commands_in(page)
    if not command.startswith(tuple(NOT_HERE))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inspect_models_here()
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_the_commands_are_found() -> None:
    assert len(LINES) > 30
    lost = [name for name in ("operate.md", "size-the-tiers.md", "README.md")
            if not commands_in(PAGES[name])]  # fmt: skip
    assert lost == []


@pytest.mark.parametrize("name", PAGES)
def test_no_command_is_outside_a_console_block(name: str) -> None:
    assert stray_commands(PAGES[name]) == []


def test_a_stray_command_is_detected() -> None:
    assert stray_commands("text\n```\nkvtiers inspect /x\n```\n") == ["kvtiers inspect /x"]
    assert stray_commands("text\n\n    vllm serve MODEL\n") == ["vllm serve MODEL"]
    assert stray_commands("```console\n$ kvtiers inspect /x\n```\n```json\n{}\n```\n") == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_the_text_have_existing_names_and_options(name: str) -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups if group.name}
    reference = (ROOT / "docs/reference/command-line.md").read_text()
    for text in re.findall(r"`kvtiers ([a-z][^`]*)`", BLOCK.sub("", PAGES[name])):
        command, *rest = text.split()
        assert f"\n## {command}\n" in reference or command in known, text
        # these accept flags of other programs as well
        if command not in ("doctor", "plan", "bench", "serve"):
            options = [word.split("=")[0] for word in rest if word.startswith("--")]
            assert [option for option in options if f"`{option}`" not in reference] == [], text


def test_links_lead_somewhere() -> None:
    for name, page in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs/guides"
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", BLOCK.sub("", page)):
            assert (folder / link).exists(), f"{name}: {link}"


@pytest.mark.thorough
@pytest.mark.parametrize("line", LINES)
def test_a_command_of_a_guide_runs(
    line: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(line)
    if program == "python":
        run_program(words)
    elif program == "vllm":
        assert words[:2] == ["serve", "MODEL"]
        check_serve(words[2:], model, tmp_path)
    else:
        assert program == "kvtiers", "a command that this test cannot run"
        run_kvtiers(line, tmp_path, model)


def sample_after(command: str) -> list[str]:
    """The lines of the output that the guide on operating shows after a command."""
    after = PAGES["operate.md"].partition(f"\n$ {command}")[2].split("```\n")
    return [line.rstrip() for line in after[2].splitlines()]


def on_80_columns(monkeypatch: pytest.MonkeyPatch, module: str, *words: object) -> list[str]:
    """The output of a command on a terminal of 80 columns, without colours."""
    terminal = Console(width=80, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(f"offload.cli.{module}.screen", lambda: terminal)
    result = kvtiers(*words)
    assert result.code == 0, result.err
    return [line.rstrip() for line in result.out.splitlines()]


def test_samples_fit_80_columns() -> None:
    blocks = [text for kind, text in BLOCK.findall(PAGES["operate.md"]) if not kind]
    lines = [line for text in blocks for line in text.splitlines()]
    assert len(lines) > 40
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.thorough
def test_the_sample_of_plan_is_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = [c for c in commands_in(PAGES["operate.md"]) if c.startswith("kvtiers plan --tok")]
    shown = on_80_columns(monkeypatch, "plan", *command.split()[1:])
    assert shown == sample_after(command)


@pytest.mark.thorough
def test_the_sample_of_inspect_has_the_lines_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rank_folder(tmp_path, range(20))
    with writer(tmp_path, records=20) as server:
        shown = on_80_columns(monkeypatch, "inspect", "inspect", tmp_path)
        server.stop()
    sample = sample_after("kvtiers inspect /var/cache/kv")
    assert [line.split("  ")[0] for line in shown[2:]] == [
        line.split("  ")[0] for line in sample[2:]
    ]
    for lines in (shown, sample):
        assert lines[0].startswith(f"{Namespace.of(FIELDS).name}  tiny/llama, ")
        assert lines[1].startswith("in use by pid ")


def run_program(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_serve(flags: list[str], model: Path, folder: Path) -> None:
    """The result of ``vllm serve`` with these flags, on a machine a thousand times smaller."""
    smaller = {"/var/cache/kv": str(folder / "kv"), "GiB": "MiB", "TiB": "MiB"}
    for shown, real in smaller.items():
        flags = [flag.replace(shown, real) for flag in flags]
    result = kvtiers("doctor", model, *flags, "--json")
    report = result.json
    about = ("needs the package mooncake",)
    assert [text for text in report["refused"] if not any(a in text for a in about)] == []


def run_kvtiers(line: str, tmp_path: Path, model: Path) -> None:
    root, other = tmp_path / "kv", tmp_path / "other"
    for fields in (FIELDS, OTHER):
        make_rank_folder(root, range(4), fields=fields)
    if "--namespace" in line:
        assert Namespace.of(FIELDS).name.startswith("be57bd0d"), "the name in the guide"
    if " import " in line:
        export = ["export", root, tmp_path / "blocks.kvt", "--model", "tiny/llama"]
        assert kvtiers(*export).code == 0
        shutil.rmtree(root)
    trace = alternating(40)
    for name in ("requests.jsonl", "kv-prompts.jsonl"):
        with TraceWriter(tmp_path / name, trace.name, trace.block_tokens) as writer:
            for request in trace.requests:
                writer.write(request)
    (tmp_path / "kvtiers.json").write_text('{"cpu": {"capacity": "64MiB"}}')
    record = LoggedRequest("cmpl-4f1a-0", 1.0, 600, 0, 576, 32, {"lmdb": 32})
    (tmp_path / "why.jsonl").write_text(json.dumps(record.as_json()) + "\n")
    server = Server()
    server.fill()
    with serving([server.page]) as address:
        places = {
            "/var/cache/kv": str(root),
            "/var/cache/other": str(other),
            "localhost:8000": address,
            "/var/log/kvtiers.jsonl": "why.jsonl",
            "/var/log/kv-prompts.jsonl": "kv-prompts.jsonl",
            "MODEL": str(model),
            "--interval 10": "--interval 0.1",
            "users=200": "users=20",
        }
        for shown, real in places.items():
            line = line.replace(shown, real)
        if line.startswith("kvtiers top") and "--" not in line:
            line += " --once --interval 0.1"  # it would never end
        if line.startswith("kvtiers serve"):  # it would become a server
            line = line.replace("GiB", "MiB") + " --dry-run"
        if line.startswith("kvtiers simulate"):
            line += " --jobs 1"
        result = kvtiers(*shlex.split(line)[1:])
    assert result.code == 0, result.err
    assert result.out or "bench" in line

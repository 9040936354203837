"""Every command line of the guide runs, as it stands there, on a store like the one described."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from demo.tiny_model import make_llama
from offload.namespace import Namespace
from offload.why import RequestRecord
from policies.trace import TraceWriter
from tests.cli.test_plan import alternating
from tests.cli.test_top import Server, serving
from tests.cli.world import FIELDS, OTHER, ROOT, kvtiers, make_store

GUIDES = ("docs/guides/operate.md", "docs/guides/misses.md")
LINES = [
    line
    for guide in GUIDES
    for block in re.findall(r"```console\n(.*?)```", (ROOT / guide).read_text(), re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_every_line_of_a_console_block_is_a_command() -> None:
    assert len(LINES) > 15
    assert [line for line in LINES if not line.startswith("$ kvtiers ")] == []


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_guide(
    line: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root, other = tmp_path / "kv", tmp_path / "other"
    for fields in (FIELDS, OTHER):
        make_store(root, range(4), fields=fields)
    if "--namespace" in line:
        assert Namespace.of(FIELDS).name.startswith("be57bd0d"), "the name in the guide"
    if "import" in line:
        export = ["export", root, tmp_path / "blocks.kvt", "--model", "tiny/llama"]
        assert kvtiers(*export).code == 0
        shutil.rmtree(root)
    trace = alternating(40)
    with TraceWriter(tmp_path / "requests.jsonl", trace.name, trace.block_tokens) as writer:
        for request in trace.requests:
            writer.write(request)
    record = RequestRecord("cmpl-4f1a-0", 1.0, 600, 0, 576, 32, {"lmdb": 32})
    (tmp_path / "why.jsonl").write_text(json.dumps(record.as_json()) + "\n")
    server = Server()
    server.fill()
    with serving([server.page]) as address:
        places = {
            "/var/cache/kv": str(root),
            "/var/cache/other": str(other),
            "localhost:8000": address,
            "/var/log/kvtiers.jsonl": "why.jsonl",
            "MODEL": str(model),
            "--interval 10": "--interval 0.1",
        }
        for shown, real in places.items():
            line = line.replace(shown, real)
        if line.startswith("$ kvtiers top") and "--" not in line:
            line += " --once --interval 0.1"  # it would go on for ever
        result = kvtiers(*shlex.split(line)[2:])
    assert result.code == 0, result.err
    assert result.out or "bench" in line

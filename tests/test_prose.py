"""The prose linter: what it finds, what it leaves alone, and that no folder gets worse."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_linter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts/prose.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


prose = load_linter()
RULES = tomllib.loads(prose.RULES.read_text(encoding="utf-8"))


def found_in_python(source: str) -> list[tuple[int, str]]:
    texts = prose.python_texts(source, messages=True)
    return [(f.line, f.words) for t in texts for f in prose.findings_in("a.py", t, RULES)]


def found_in_markdown(source: str) -> list[tuple[int, str]]:
    texts = prose.markdown_texts(source)
    return [(f.line, f.words) for t in texts for f in prose.findings_in("a.md", t, RULES)]


def test_no_folder_has_more_findings_than_it_may() -> None:
    findings = prose.findings()
    counts = Counter(prose.folder_of(finding) for finding in findings)
    left = prose.allowed()
    worse = {f: (n, left.get(f, 0)) for f, n in counts.items() if n > left.get(f, 0)}
    listed = [str(f) for f in findings if prose.folder_of(f) in worse]
    assert not worse, "\n".join(["folder: (findings, allowed)", str(worse), *listed])


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Whoever asks first makes it.", "Whoever"),
        ("The tier shall be closed.", "shall"),
        ("A full tier is well.", "is well"),
        ("A thread of its own writes it.", "of its own"),
        ("The planner is told of it.", "told"),
        ("Whether the tier is asked.", "Whether the tier is asked."),
        ("Those that are pinned.", "Those that are pinned."),
        ("What has left the tiers lately.", "What has left the tiers lately."),
    ],
)
def test_each_construction_is_found_everywhere(sentence: str, words: str) -> None:
    assert found_in_markdown(f"# A\n\nA line.\n{sentence}\n") == [(4 - ends(words), words)]
    assert found_in_python(f'def f():\n    """{sentence}"""\n') == [(2, words)]
    if not ends(words):
        assert found_in_python(f"# {sentence}\n") == [(1, words)]
        assert found_in_python(f"raise ValueError('{sentence} Mend it.')\n") == [(1, words)]


def ends(words: str) -> int:
    """1 for a construction, which is reported where its paragraph begins; 0 for a word."""
    return int(words.endswith("."))


def test_code_is_no_prose() -> None:
    assert found_in_markdown("```\nwhoever\n```\nUse `told` and [it](whoever.md).\n") == []
    example = '"""A policy.\n\n    whoever = told\n"""\n'
    assert found_in_python(example + "whoever = told\n") == []


def test_plain_sentences_pass() -> None:
    good = (
        "Whether it is read depends on its state. The well-known tier is well below its capacity."
    )
    assert found_in_markdown(f"## What may enter a tier\n\n{good}\n") == []


def test_counts_only_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "left.toml"
    left.write_text('# A head.\n\n[findings]\n"a" = 3\n"b" = 2\n"c" = 1\n')
    monkeypatch.setattr(prose, "LEFT", left)
    prose.lower(Counter({"a": 1, "b": 9}))
    assert prose.allowed() == {"a": 1, "b": 2}
    assert left.read_text().startswith("# A head.\n")

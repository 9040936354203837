"""The prose linter: what it reports and what it ignores, and that no text in the tree has a
finding."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.scripts import load_script

prose = load_script("prose")
RULES = tomllib.loads(prose.RULES.read_text(encoding="utf-8"))


def found_in_python(source: str) -> list[tuple[int, str]]:
    texts = prose.python_texts(source)
    return [(f.line, f.words) for t in texts for f in prose.findings_in("a.py", t, RULES)]


def found_in_markdown(source: str) -> list[tuple[int, str]]:
    texts = prose.markdown_texts(source)
    return [(f.line, f.words) for t in texts for f in prose.findings_in("a.md", t, RULES)]


def test_no_text_has_a_finding() -> None:
    assert list(map(str, prose.findings())) == []


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Whoever asks first makes it.", "Whoever"),
        ("The tier shall be closed.", "shall"),
        ("A full tier is well.", "is well"),
        ("A thread of its own writes it.", "of its own"),
        ("The planner is told of it.", "told"),
        ("A tier that may be somebody else's.", "somebody else's"),
        ("The first damaged record, nobody knows whose.", "nobody knows"),
        ("One found no room.", "found no room"),
        ("Keys like these, and so on and so forth.", "and so on and so forth"),
        ("Chunks behind a gap cannot be hit.", "behind a gap"),
        ("Give the memory of the tier, as 64GiB.", "as 64GiB"),
        ("Only this part of each trace, as 0.5:1.", "as 0.5:1"),
        ("Requests without a trace, as users=200,turns=6.", "as users=200"),
        ("A folder and its capacity, as /kv:2TiB.", "as /kv:2TiB"),
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
        assert found_in_python(f"raise ValueError({f'{sentence} Mend it.'!r})\n") == [(1, words)]


def test_a_note_is_found_only_where_a_docstring_begins() -> None:
    sentence = "Note which ranks have the chunk."
    assert found_in_python(f'def f():\n    """{sentence}"""\n') == [(2, sentence)]
    assert found_in_python(f'def f():\n    """A job. {sentence}"""\n') == []
    assert found_in_markdown(f"{sentence}\n") == []


@pytest.mark.parametrize(
    "text", ["That queue.", "Of all blocks, in the CPU tier.", "Per {unit}, at most."]
)
def test_a_help_text_names_what_the_option_is(text: str) -> None:
    for literal in (repr(text), f"f{text!r}"):
        [(line, words)] = found_in_python(f"threads = Option(1,\n    help={literal})\n")
        assert line == 2
        assert text.startswith(words)
    assert found_in_python(f"threads = Option(1, help={'Tokens. ' + text!r})\n") == []
    assert found_in_python(f"threads = Option(1, text={text!r})\n") == []


@pytest.mark.parametrize(
    "file", ["tests/a.py", "tests/mutants/faults/a.toml", "docs/a.yaml", "a.sh"]
)
def test_the_whole_tree_is_read(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('case = "for whoever reads it"\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert [(f.path, f.line, f.words) for f in prose.findings()] == [(file, 1, "whoever")]


def ends(words: str) -> int:
    """Returns 1 for a construction, which is reported at the beginning of its paragraph, and 0 for
    a word."""
    return int(words.endswith("."))


def test_code_is_not_checked_as_prose() -> None:
    assert found_in_markdown("```\nwhoever\n```\nUse `told` and [it](whoever.md).\n") == []
    example = '"""A policy.\n\n    whoever = told\n"""\n'
    assert found_in_python(example + "whoever = told\n") == []


def test_plain_sentences_pass() -> None:
    good = (
        "Whether it is read depends on its state. The well-known tier is well below its capacity. "
        "A size such as 64GiB is stored as a number."
    )
    assert found_in_markdown(f"## What may enter a tier\n\n{good}\n") == []

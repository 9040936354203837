"""Messages that the guides quote are those of the code, so that a reader finds them in a log."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.imports import python_files
from tests.test_docs import PAGES, ROOT, name_of, prose_of

GUIDES = [page for page in PAGES if "docs/decisions" not in str(page)]
HOLE = "X"
"""Stands for a value in a message of the code."""
LEFT_OUT = re.compile(r"\(?\.\.\.\)?")
VALUE = re.compile(r"[A-Z]+|\d+|lmdb|/\S+|[0-9a-f]{8,}\W*|'\S+")
"""Stands for a value in a quoted message."""
PROGRAMS = ("import ", "kvtiers ", "python ", "vllm ", "pip ", "pytest ", "./run ", "bash ", "git ")
NOT_OURS = frozenset({"packed ... KV cache blocks cannot be split into"})
FIXED_MIN = 3


@cache
def messages() -> str:
    """All texts of the code, one per line, with holes for the values in them."""
    found = []
    for path in python_files("offload", "tiers", "policies"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else HOLE for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[\d.,]*[sdrfx]", HOLE, node.value))
    return "\n".join(" ".join(text.split()) for text in found)


def is_message(text: str) -> bool:
    """True for a sentence, but not for a command, code or a setting."""
    if text.startswith(PROGRAMS):
        return False
    words = re.findall(r"(?<!\S)[a-z]+(?=[,;:]?(?:\s|$))", text)
    return len(words) >= FIXED_MIN and not re.search(r"[=<]|--|\w\(", text)


def in_code(quoted: str) -> bool:
    """True if the code has a message template that matches this text."""
    pieces = [piece.strip(" .:") for piece in LEFT_OUT.split(quoted)]
    return all(_piece_in_code(piece) for piece in pieces if len(piece.split()) >= FIXED_MIN)


def _piece_in_code(piece: str) -> bool:
    words = [
        r"\S+" if VALUE.fullmatch(word) else rf"(?:{re.escape(word)}|{HOLE}\W*)"
        for word in piece.split()
    ]
    matches = re.finditer(" ".join(words), messages())
    return any(len(re.findall(rf"\b(?!{HOLE}\b)\w+", m[0])) >= FIXED_MIN for m in matches)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_quoted_messages_are_in_the_code(page) -> None:
    spans = re.findall(r"`([^`]+)`", prose_of(page))
    quoted = [" ".join(span.split()) for span in spans]
    assert [t for t in quoted if is_message(t) and t not in NOT_OURS and not in_code(t)] == []


def test_a_quote_that_is_not_a_message_of_ours_is_detected() -> None:
    for text in ("it was not asked", "the tiers go on", "tier lmdb is written always"):
        assert is_message(text)
        assert not in_code(text), text
    for text in ("tier lmdb is read again", "tier 0 could not be read: ...",
                 "the tier in FOLDER begins empty: ..."):  # fmt: skip
        assert is_message(text)
        assert in_code(text), text
    assert not is_message("kvtiers inspect /var/cache/kv --json")
    assert not is_message('"geometry": "translate"')


def test_messages_are_found() -> None:
    text = (ROOT / "docs/guides/when-a-disk-dies.md").read_text(encoding="utf-8")
    assert sum(map(is_message, re.findall(r"`([^`\n]+)`", text))) > 5

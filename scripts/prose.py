"""Checks the prose (Markdown, docstrings, comments and messages; whole lines of TOML, YAML and
shell scripts) against the rules in ``prose.toml``.

python scripts/prose.py            # every finding; fails if there is one
python scripts/prose.py offload    # only in these files and folders
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "scripts" / "prose.toml"
PYTHON = ("offload", "tiers", "policies", "bench", "demo", "examples", "scripts", "tests")
LINES_IN = (".toml", ".yaml", ".sh")
SAMPLES = ("scripts/prose.toml", "tests/test_prose.py")
"""Files that contain the words to avoid: the rules, and sentences for tests."""
MESSAGE_WORDS_MIN = 3
UNREAD = ("bench/results/", "docs/reference/api.md")
"""Generated Markdown: results, and docstrings that are checked in the source."""


class Text(NamedTuple):
    line: int
    kind: str  # "markdown", "docstring", "comment", "message", "help" or "line"
    text: str


class Finding(NamedTuple):
    path: str
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.words}'; better: {self.instead}"


def without_code(text: str) -> str:
    """The text with code spans and link targets blanked out; line breaks stay."""
    text = re.sub(r"(`{1,2})(?!`).+?\1", lambda m: re.sub(r"[^\n]", "x", m[0]), text, flags=re.S)
    return re.sub(r"\]\([^)\n]*\)", "]", text)


def markdown_texts(source: str) -> Iterator[Text]:
    """Paragraphs, list items and table rows. Fenced blocks are code."""
    fenced = False
    start, block = 1, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        elif fenced:
            line = ""
        starts_item = bool(re.match(r"\s*(?:[*+-]|\d+\.|\||#)\s?", line))
        if block and (not line.strip() or starts_item):
            yield Text(start, "markdown", "\n".join(block))
            block = []
        if line.strip():
            if not block:
                start = number
            block.append(re.sub(r"^\s*(?:[*+-]|\d+\.|#+)\s+", "", line))


def lines_of(source: str) -> Iterator[Text]:
    return (Text(number, "line", line) for number, line in enumerate(source.splitlines(), 1))


def python_texts(source: str) -> Iterator[Text]:
    """Docstrings, comments, and string literals of several words, such as errors, log lines and
    help."""
    tree = ast.parse(source)
    docstrings = set[int]()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings.add(id(value))
            prose = docstring_prose(value.value, margin=value.col_offset)
            yield Text(value.lineno, "docstring", prose)
    helps = set(map(id, help_texts(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value
            is_help = id(node) in helps
            if isinstance(text, str) and (is_help or len(text.split()) >= MESSAGE_WORDS_MIN):
                yield Text(node.lineno, "help" if is_help else "message", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], "comment", token.string.lstrip("#: "))


def help_texts(tree: ast.AST) -> Iterator[ast.expr]:
    """The literals that ``help=`` begins with in a call: descriptions of a command line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for given in node.keywords:
                if given.arg == "help":
                    text = given.value
                    yield from text.values[:1] if isinstance(text, ast.JoinedStr) else [text]


def docstring_prose(text: str, *, margin: int) -> str:
    """The docstring without examples, which are indented deeper; line breaks stay."""
    deeper = " " * (margin + 4)
    return "\n".join("" if line.startswith(deeper) else line for line in text.splitlines())


def findings_in(path: str, text: Text, rules: dict[str, list[dict[str, str]]]) -> Iterator[Finding]:
    prose = without_code(text.text)
    for rule in rules["words"]:
        for match in re.finditer(rf"\b(?:{rule['pattern']})\b", prose, re.I):
            line = text.line + prose.count("\n", 0, match.start())
            yield Finding(path, line, match[0], rule["instead"])
    openings = list(rules["openings"]) if text.kind in ("markdown", "docstring") else []
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", prose) if s.strip()]
    if text.kind == "docstring":
        openings += rules["docstrings"]
        sentences = sentences[:1]
    elif text.kind == "help":
        openings += rules["help"]
        sentences = sentences[:1]
    for sentence in sentences:
        sentence = " ".join(sentence.split())
        for rule in openings:
            if re.match(rule["pattern"], sentence):
                yield Finding(path, text.line, sentence[:60], rule["instead"])
                break


def tracked(suffixes: tuple[str, ...]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # not a git checkout, but an unpacked archive
        files = [p for f in (*PYTHON, "docs") for p in (ROOT / f).rglob("*")] + [*ROOT.iterdir()]
        names = [p.relative_to(ROOT).as_posix() for p in files]
    else:
        names = listed.stdout.splitlines()
    return sorted(n for n in names if n.endswith(suffixes) and (ROOT / n).is_file())


def findings() -> list[Finding]:
    rules = tomllib.loads(RULES.read_text(encoding="utf-8"))
    found = list[Finding]()
    for name in tracked((".md", ".py", *LINES_IN)):
        if name.startswith((*UNREAD, *SAMPLES)):
            continue
        source = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".md"):
            texts = markdown_texts(source)
        elif name.endswith(".py"):
            texts = python_texts(source)
        else:
            texts = lines_of(source)
        for text in texts:
            found.extend(findings_in(name, text, rules))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="only these files and folders")
    options = parser.parse_args(arguments)
    found = [f for f in findings() if not options.paths or f.path.startswith(tuple(options.paths))]
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

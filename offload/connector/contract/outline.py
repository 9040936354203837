"""Finds the definition of a name in source text and parses only that definition.

vLLM's largest modules take half a second to parse, but the check at start may take only a tenth of
a second for all of them. So a module is split at the lines that begin a statement, and only the
definitions of wanted names are parsed. Strings in three quotes, which may hold anything at the
beginning of a line, are emptied first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_LONG_STRING = re.compile(r'("""|\'\'\')(?:\\.|(?!\1)[^\\])*\1', re.DOTALL)
_NAMED = re.compile(r"\s*(?:class|def|async\s+def)\s+(\w+)")
_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::|=(?!=))")
_CONTINUED = re.compile(r"\s*(?:else|elif|except|finally)\b")
_COMPOUND = re.compile(r"\s*(?:if|try|with|for|while|else|elif|except|finally)\b")
_IMPORT = re.compile(r"\s*(?:from|import)\b")
_HEAD_END = re.compile(r":[ \t]*(?:#[^\n]*)?\n")
_DEFINED = re.compile(r"^[ \t]*(?:class|def|async\s+def)\s", re.MULTILINE)
_FIRST = re.compile(r"^( *)[^\s#]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """The text of one statement, with its indentation; ``name`` is the name that the statement
    defines, if the text shows it. The text does not show it for compound statements and imports;
    see ``is_open``."""

    name: str
    text: str
    is_open: bool

    @property
    def is_class(self) -> bool:
        """True if it defines a class."""
        return _undecorated(self.text).lstrip().startswith("class ")

    @property
    def is_function(self) -> bool:
        """True if it defines a function."""
        return _undecorated(self.text).lstrip().startswith(("def ", "async def "))

    def parse(self) -> list[ast.stmt]:
        """The statement. Raises ``SyntaxError``."""
        if self.text.startswith((" ", "\t")):
            outer = ast.parse("if True:\n" + self.text).body[0]
            assert isinstance(outer, ast.If)
            return outer.body
        return ast.parse(self.text).body


def without_long_strings(text: str) -> str:
    """The text with every string in three quotes emptied; line numbers change."""
    parts = text.split('"""')
    if "'''" in text or '\\"' in text or len(parts) % 2 == 0:
        return _LONG_STRING.sub('""', text)
    return '""'.join(parts[::2])


def blocks(text: str, indent: int) -> Iterator[Block]:
    """The statements that begin at this indentation."""
    starts = [found.start() for found in _starts(indent).finditer("\n" + text)]
    ends = [*starts[1:], len(text)][: len(starts)]
    merged: list[str] = []
    for start, end in zip(starts, ends, strict=True):
        part = text[start:end]
        previous = merged[-1].lstrip() if merged else ""
        is_decorated = previous.startswith("@") and not _undecorated(previous)
        if merged and (is_decorated or _CONTINUED.match(part)):
            merged[-1] += part
        else:
            merged.append(part)
    for part in merged:
        yield _block(part)


def _starts(indent: int) -> re.Pattern[str]:
    """Finds the first line of a statement at this indentation. The pattern begins with a line
    break, which `re` finds faster than ``^``."""
    return re.compile(rf"\n {{{indent}}}(?=[^\s#)\]}}])")


def _undecorated(part: str) -> str:
    """The text from the first line that begins like a definition."""
    found = _DEFINED.search(part)
    return part[found.start() :] if found else ""


def _block(part: str) -> Block:
    body = _undecorated(part) if part.lstrip().startswith("@") else part
    if _COMPOUND.match(body) or _IMPORT.match(body):
        return Block("", part, is_open=True)
    found = _NAMED.match(body) or _ASSIGNED.match(body)
    return Block(found[1] if found else "", part, is_open=False)


class Outline:
    """The statements of one module or class, by the names that they define."""

    def __init__(self, text: str, indent: int = 0) -> None:
        self._text = text
        self._indent = indent

    @cached_property
    def _blocks(self) -> list[Block]:
        return list(blocks(self._text, self._indent))

    @cached_property
    def _by_name(self) -> dict[str, list[Block]]:
        found: dict[str, list[Block]] = {}
        for block in self._blocks:
            found.setdefault(block.name, []).append(block)
        return found

    @cached_property
    def names(self) -> list[str]:
        """The names defined at this level, in order, as far as the text shows without parsing."""
        return [block.name for block in self._blocks if block.name]

    def named(self, name: str) -> list[Block]:
        """The statements that define this name."""
        return self._by_name.get(name, [])

    @cached_property
    def open_statements(self) -> list[ast.stmt]:
        """Imports, and all statements within conditions; parsed."""
        return [node for block in self._blocks if block.is_open for node in block.parse()]

    @staticmethod
    def of_class(text: str) -> Outline:
        """Return the outline of a class's body; ``text`` is the source of the class."""
        undecorated = _undecorated(text)
        end = _HEAD_END.search(undecorated)
        body = undecorated[end.end() :] if end else ""
        first = _FIRST.search(body)
        return Outline(body, len(first[1]) if first else 4)

    @staticmethod
    def head_of(text: str) -> ast.ClassDef:
        """The class without its body."""
        undecorated = _undecorated(text)
        end = _HEAD_END.search(undecorated)
        head = undecorated[: end.end()] if end else undecorated
        indent = len(head) - len(head.lstrip(" "))
        decorators = text[: len(text) - len(undecorated)]
        found = Block("", f"{decorators}{head}{' ' * (indent + 4)}pass\n", is_open=False).parse()[0]
        assert isinstance(found, ast.ClassDef)
        return found

"""Finds in which order and with which arguments functions of vLLM call our methods."""

from __future__ import annotations

import ast
import bisect
import contextlib
import re
from collections.abc import Collection, Iterable, Iterator

from offload.connector.contract.facts import AnyFunction, Fact
from offload.connector.contract.library import CLASS, ClassMember, Library
from offload.connector.contract.source import PackageSource

_OTHERS = re.compile(r"\b(?:ec|aux_output)_connector\.")
"""Connectors of other kinds whose hooks have the same names."""
_DEFINITION = re.compile(r"\n(    )?(class|def|async def) (\w+)")
_CALL = re.compile(r"(?<!def )\b([\w.]++)\(")
_BRACKET = re.compile(r"[()\[\]{}]")


def function_at(library: Library, at: str) -> AnyFunction | None:
    """The function at ``module:name`` or ``module:Class.name``; inherited methods do not count."""
    module, _, path = at.partition(":")
    name, _, method = path.partition(".")
    found = library.resolve(module, name)
    node: ast.stmt | None = found.node if found is not None else None
    if found is not None and found.kind == CLASS and method:
        member: ClassMember | None = library.member(found, method)
        node = member.node if member is not None else None
    return node if isinstance(node, AnyFunction) else None


def order_of(node: AnyFunction, watched: Collection[str]) -> Fact:
    """The watched calls in source order, each with the innermost condition around it."""
    steps = [
        (call.lineno, call.col_offset, name, condition)
        for call, condition in _calls(node.body, "")
        if (name := step_name(ast.unparse(call.func))) in watched
    ]
    return {"is": "order", "steps": [[name, condition] for _, _, name, condition in sorted(steps)]}


def names_in_order(library: Library, at: str, watched: Collection[str]) -> list[str] | None:
    """The names of the steps of ``order_of``, read from the text in a tenth of the time."""
    module_name, _, path = at.partition(":")
    owner, _, name = path.rpartition(".")
    found = library.resolve(module_name, owner or name)
    if found is None:
        return None
    text = found.text if owner else (library.module(found.module) or found).text
    body = _body_of(text, name, "    " if owner else "")
    if body is None:
        return None
    steps = []
    for each in _CALL.finditer(body):
        called = step_name(each[1])
        if called in watched and "#" not in body[body.rfind("\n", 0, each.start()) : each.start()]:
            steps.append(called)
    return steps


def _body_of(text: str, name: str, indent: str) -> str | None:
    begin = re.search(rf"^{indent}(?:async )?def {re.escape(name)}\(", text, re.MULTILINE)
    if begin is None:
        return None
    end = re.compile(rf"^ {{0,{len(indent)}}}[^\s)#]", re.MULTILINE).search(text, begin.end())
    return text[begin.end() : end.start() if end else len(text)]


def step_name(called: str) -> str:
    """The name under which a call is watched: its last part, prefixed by the receiver for a
    connector of another kind."""
    others = _OTHERS.search(called)
    return called[others.start() :] if others else called.rpartition(".")[2]


def _calls(body: Iterable[ast.AST], condition: str) -> Iterator[tuple[ast.Call, str]]:
    for node in body:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            yield from _calls([node.test], condition)
            yield from _calls(node.body, f"if {test}")
            yield from _calls(node.orelse, f"unless {test}")
            continue
        if isinstance(node, ast.Call):
            yield node, condition
        yield from _calls(ast.iter_child_nodes(node), condition)


def callers_in(
    source: PackageSource, within: Collection[str], without: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(module, text) of the files that may call our methods."""
    for path in source.paths():
        if path.startswith(tuple(within)) and not path.startswith(tuple(without) or ("-",)):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield module, source.read(path) or ""


def call_pattern(hooks: Collection[str]) -> re.Pattern[str]:
    """Finds possible calls of these methods in text."""
    return re.compile(rf"\.\s*({'|'.join(sorted(map(re.escape, hooks)))})\b")


def calls_in(
    library: Library, module_name: str, receiver: str, pattern: re.Pattern[str]
) -> Iterator[tuple[str, str, str]]:
    """(hook, function, arguments) of each call in a module whose receiver matches; arguments are
    ``2 keyword keyword``, or ``read`` for an attribute that is not called. Searches the text
    instead of parsing it, because these modules are vLLM's largest."""
    module = library.module(module_name)
    if module is None:
        return
    text, ends_so = module.text, re.compile(rf"(?:{receiver})$")
    functions: _Functions | None = None
    for found in pattern.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        before = text[max(0, found.start() - 80) : found.start()].rstrip()
        if "#" in line or not ends_so.search(before):
            continue
        functions = functions or _Functions(text)
        yield (
            found[1],
            f"{module_name}:{functions.around(found.start())}",
            _given(text, found.end()),
        )


class _Functions:
    """The functions of a module and the methods of its classes, by start position."""

    def __init__(self, text: str) -> None:
        found = list(_DEFINITION.finditer("\n" + text))
        self._starts = [each.start() for each in found]
        self._names: list[str] = []
        owner = ""
        for each in found:
            if not each[1]:
                owner = f"{each[3]}." if each[2] == "class" else ""
                self._names.append(each[3])
            else:
                self._names.append(owner + each[3])

    def around(self, position: int) -> str:
        """The function that contains this position."""
        index = bisect.bisect(self._starts, position) - 1
        return self._names[index] if index >= 0 else ""


def _given(text: str, end: int) -> str:
    if not text.startswith("(", end):
        return "read"
    depth = 0
    for found in _BRACKET.finditer(text, end):
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            with contextlib.suppress(SyntaxError):
                node = ast.parse(f"f{text[end : found.end()]}", mode="eval").body
                return arguments(node) if isinstance(node, ast.Call) else "read"
            break
    return "?"


def arguments(call: ast.Call) -> str:
    """The number of positional arguments and the keywords."""
    stars = any(isinstance(each, ast.Starred) for each in call.args)
    keywords = sorted(each.arg or "**" for each in call.keywords)
    return " ".join([f"{len(call.args)}{'*' * stars}", *keywords])

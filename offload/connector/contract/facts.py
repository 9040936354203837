"""Describes names of vLLM as facts: plain JSON that can be kept and compared."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from offload.connector.contract.library import CLASS, FUNCTION, MODULE, Definition, Library

Fact = dict[str, Any]
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_ENUMS = frozenset({"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})
_STRUCTS = frozenset({"Struct", "BaseModel", "NamedTuple"})
_MAKERS = ("dataclass", "config")
VALUE_MAX = 200
"""Longer values are not compared: they are tables, not constants."""


def of_definition(library: Library, found: Definition) -> Fact:
    """Returns what vLLM's source says about an imported name."""
    if found.kind == MODULE:
        return {"is": "module"}
    if found.kind == FUNCTION:
        assert isinstance(found.node, AnyFunction)
        return of_function(found.node)
    if found.kind == CLASS:
        fact: Fact = {"is": "class"}
        if library.base_names(found) & _ENUMS:
            fact["enum"] = dict(_enum_members(found))
        return fact
    return of_value(found.node)


def of_value(node: ast.stmt | None) -> Fact:
    """Returns what the source says about a constant or a class attribute."""
    fact: Fact = {"is": "value"}
    if isinstance(node, ast.AnnAssign):
        fact["type"] = plain(node.annotation)
    value = getattr(node, "value", None)
    if isinstance(value, ast.expr):
        text = ast.unparse(value)
        fact["value"] = text if len(text) <= VALUE_MAX else "..."
    return fact


def of_function(node: AnyFunction) -> Fact:
    """Returns what the source says about a function or method."""
    fact: Fact = {"is": _kind(node)}
    if fact["is"] != "property":
        fact["parameters"] = parameters(node.args)
    if node.returns is not None:
        fact["returns"] = plain(node.returns)
    return fact


def _kind(node: AnyFunction) -> str:
    names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if names & {"property", "cached_property"}:
        return "property"
    return next((each for each in ("classmethod", "staticmethod") if each in names), "function")


def parameters(arguments: ast.arguments) -> list[str]:
    """Parameters as text without annotations: ``x``, ``y=3``, ``/``, ``*``, ``*args``."""
    found = []
    positional = [*arguments.posonlyargs, *arguments.args]
    bare = len(positional) - len(arguments.defaults)
    for index, each in enumerate(positional):
        default = f"={ast.unparse(arguments.defaults[index - bare])}" if index >= bare else ""
        found.append(each.arg + default)
        if arguments.posonlyargs and index == len(arguments.posonlyargs) - 1:
            found.append("/")
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    for each, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(each.arg + (f"={ast.unparse(given)}" if given is not None else ""))
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def plain(annotation: ast.expr) -> str:
    """An annotation as text, without quotes."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return plain(ast.parse(annotation.value, mode="eval").body)
    return ast.unparse(annotation).replace("'", "").replace('"', "")


def _enum_members(found: Definition) -> Iterator[tuple[str, str]]:
    for name in found.body.names:
        if name.startswith("_"):
            continue
        for block in found.body.named(name):
            for node in block.parse():
                if isinstance(node, ast.Assign):
                    yield name, ast.unparse(node.value)


def of_member(library: Library, owner: Definition, name: str) -> Fact | None:
    """Returns what the source says about a member of a class; ``None`` if there is no such
    member."""
    member = library.member(owner, name)
    if member is None:
        return None
    if isinstance(member.node, AnyFunction):
        return of_function(member.node)
    fact: Fact = {"is": "field"}
    if isinstance(member.node, ast.AnnAssign):
        fact["type"] = plain(member.node.annotation)
    if member.method is None and isinstance(member.node, ast.Assign | ast.AnnAssign):
        value = member.node.value
        if value is not None:
            fact["value"] = ast.unparse(value)[:VALUE_MAX]
    return fact


def of_constructor(library: Library, owner: Definition) -> Fact:
    """The parameters of the constructor."""
    makers = {ast.unparse(each).partition("(")[0] for each in owner.head.decorator_list}
    is_made_of_fields = any(each.rpartition(".")[2] in _MAKERS for each in makers)
    if is_made_of_fields or library.base_names(owner) & _STRUCTS:
        return {"is": "constructor", "parameters": list(_fields(library, owner))}
    member = library.member(owner, "__init__")
    if member is None or not isinstance(member.node, AnyFunction):
        return {"is": "constructor", "parameters": ["*args", "**kwargs"]}
    return {"is": "constructor", "parameters": parameters(member.node.args)[1:]}


def _fields(library: Library, owner: Definition) -> Iterator[str]:
    found: dict[str, str] = {}
    for each in reversed(list(library.lineage(owner))):
        for name in each.body.names:
            for block in each.body.named(name):
                node = block.parse()[-1]
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(
                    node.annotation
                ):
                    given = f"={ast.unparse(node.value)}" if node.value is not None else ""
                    found[name] = name + given
    yield from found.values()


def of_base(library: Library, owner: Definition) -> Fact:
    """The public methods of a class that we subclass, and which of them are abstract."""
    methods: dict[str, bool] = {}
    for each in library.lineage(owner):
        for name in each.body.names:
            if name in methods or (name.startswith("_") and name != "__init__"):
                continue
            texts = [block.text for block in each.body.named(name)]
            if any(_is_def(text) for text in texts):
                methods[name] = any("@abstractmethod" in text for text in texts)
    return {
        "is": "base",
        "abstract": sorted(name for name, is_abstract in methods.items() if is_abstract),
        "methods": sorted(methods),
    }


def _is_def(text: str) -> bool:
    words = [line.strip() for line in text.splitlines()]
    return any(word.startswith(("def ", "async def ")) for word in words[:8])

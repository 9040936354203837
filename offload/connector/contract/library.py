"""Looks up names in source text as Python would, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from offload.connector.contract.outline import Outline, without_long_strings
from offload.connector.contract.source import PackageSource

MODULE, CLASS, FUNCTION, VALUE = "module", "class", "function", "value"
_HOPS_MAX = 12
"""Maximum number of imports between a name and its definition."""
_TABLE_MIN = 4000
"""Longer values are tables, which are not examined."""
_SELF = r"^\s+self\.{name}\s*(?::[^=\n]+)?=(?!=)|^\s+self\.{name}\s*:"


@dataclass(frozen=True)
class Definition:
    """The definition behind a name. ``text`` is the text of a class."""

    kind: str
    module: str
    name: str
    node: ast.stmt | None = None
    text: str = ""

    @property
    def is_class(self) -> bool:
        return self.kind == CLASS

    @cached_property
    def body(self) -> Outline:
        return Outline.of_class(self.text)

    @cached_property
    def head(self) -> ast.ClassDef:
        return Outline.head_of(self.text)


@dataclass(frozen=True)
class ClassMember:
    """A member of a class: where it was found, and its definition there."""

    owner: Definition
    node: ast.stmt
    value_of: ast.expr | None = None
    """The value that a method assigns to the attribute, if it has no annotation."""
    method: ast.FunctionDef | None = None
    """The method that assigns ``value_of``."""


class Module:
    """One file."""

    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.name = name
        self.is_package = is_package
        self.text = without_long_strings(text)
        self.outline = Outline(self.text)

    @cached_property
    def loose(self) -> list[ast.stmt]:
        """Imports and definitions inside conditions, including nested ones."""
        found: list[ast.stmt] = []
        waiting = list(self.outline.open_statements)
        while waiting:
            node = waiting.pop(0)
            found.append(node)
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                inside = (child for child in ast.walk(node) if child is not node)
                waiting += [n for n in inside if isinstance(n, ast.stmt) and _is_near(n, node)]
        return found

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        above = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*above, *([node.module] if node.module else [])])


def _is_near(node: ast.stmt, parent: ast.stmt) -> bool:
    """True if a statement is directly in a block of its parent."""
    blocks = (getattr(parent, name, []) for name in ("body", "orelse", "finalbody", "handlers"))
    for block in blocks:
        for each in block:
            if each is node or (isinstance(each, ast.ExceptHandler) and node in each.body):
                return True
    return False


class Library:
    """The modules of several packages."""

    def __init__(self, *sources: PackageSource) -> None:
        self._sources = {source.package: source for source in sources}
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}

    def module(self, name: str) -> Module | None:
        """The module with this dotted name."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        source = self._sources.get(name.partition(".")[0])
        if source is None:
            return None
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            text = source.read(file)
            if text is not None:
                return Module(name, text, is_package=is_package)
        return None

    # -- names -------------------------------------------------------------------------------

    def resolve(self, module: str, name: str, hops: int = _HOPS_MAX) -> Definition | None:
        """Finds the definition of ``name`` in a module; ``None`` if there is none."""
        key = (module, name)
        if key not in self._found:
            self._found[key] = None  # imports may be circular
            self._found[key] = self._resolve(module, name, hops)
        return self._found[key]

    def _resolve(self, module_name: str, name: str, hops: int) -> Definition | None:
        module = self.module(module_name)
        if module is None or hops == 0:
            return None
        own = module.outline.named(name)
        if own:
            if own[-1].is_class:  # the body is parsed only when needed
                return Definition(CLASS, module_name, name, text=own[-1].text)
            if len(own[-1].text) > _TABLE_MIN and not own[-1].is_function:
                return Definition(VALUE, module_name, name)
            return self._defined(module_name, name, "", own[-1].parse()[-1])
        for node in module.loose:
            if isinstance(node, ast.ImportFrom | ast.Import):
                found = self._imported(module, node, name, hops)
                if found is not None:
                    return found
            elif name in names_of(node):
                return self._defined(module_name, name, ast.unparse(node) + "\n", node)
        if self.module(f"{module_name}.{name}") is not None:
            return Definition(MODULE, f"{module_name}.{name}", "")
        return None

    @staticmethod
    def _defined(module: str, name: str, text: str, node: ast.stmt) -> Definition:
        if isinstance(node, ast.ClassDef):
            return Definition(CLASS, module, name, text=text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Definition(FUNCTION, module, name, node=node)
        return Definition(VALUE, module, name, node=node)

    def _imported(
        self, module: Module, node: ast.ImportFrom | ast.Import, name: str, hops: int
    ) -> Definition | None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    target = alias.name if alias.asname else name
                    known = self.module(target) is not None
                    return Definition(MODULE, target, "") if known else None
            return None
        base = module.absolute(node)
        for alias in node.names:
            if alias.name == "*" and base != module.name:
                found = self.resolve(base, name, hops - 1)
                if found is not None:
                    return found
            elif (alias.asname or alias.name) == name:
                return self.resolve(base, alias.name, hops - 1)
        return None

    def expression(self, module: str, node: ast.expr) -> Definition | None:
        """Finds the definition of a dotted name in a module; for ``X[...]``, the definition of
        ``X``."""
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id)
        if isinstance(node, ast.Attribute):
            base = self.expression(module, node.value)
            if base is not None and base.kind == MODULE:
                return self.resolve(base.module, node.attr)
            return None
        if isinstance(node, ast.Subscript):
            return self.expression(module, node.value)
        return None

    # -- classes -----------------------------------------------------------------------------

    def bases(self, definition: Definition) -> list[Definition]:
        """The direct bases that the library contains."""
        found = (self.expression(definition.module, base) for base in definition.head.bases)
        return [base for base in found if base is not None and base.is_class]

    def lineage(self, definition: Definition) -> Iterator[Definition]:
        """The class and all its bases, each once, approximately in lookup order."""
        seen: set[tuple[str, str]] = set()
        waiting = [definition]
        while waiting:
            each = waiting.pop(0)
            if (each.module, each.name) in seen:
                continue
            seen.add((each.module, each.name))
            yield each
            waiting = [*self.bases(each), *waiting]

    def base_names(self, definition: Definition) -> set[str]:
        """The bare names of all bases, including those outside the library."""
        found = set()
        for each in self.lineage(definition):
            found |= {ast.unparse(base).rpartition(".")[2] for base in each.head.bases}
        return found

    def member(self, definition: Definition, name: str) -> ClassMember | None:
        """A member of a class, inherited ones included."""
        return next(self.members(definition, name), None)

    def members(self, definition: Definition, name: str) -> Iterator[ClassMember]:
        """The definitions of a member in each class of the lineage."""
        for each in self.lineage(definition):
            found = self._own_member(each, name)
            if found is not None:
                yield found

    @staticmethod
    def _own_member(owner: Definition, name: str) -> ClassMember | None:
        if name not in owner.text:
            return None
        own = owner.body.named(name)
        if own:
            return ClassMember(owner, _main(own[-1].parse()))
        for node in owner.body.open_statements:
            for child in ast.walk(node):
                if isinstance(child, ast.stmt) and name in names_of(child):
                    return ClassMember(owner, child)
        if re.search(_SELF.format(name=re.escape(name)), owner.text, re.MULTILINE):
            return _assigned_to_self(owner, name)
        return None


def _main(nodes: list[ast.stmt]) -> ast.stmt:
    return nodes[-1]


def _assigned_to_self(owner: Definition, name: str) -> ClassMember | None:
    pattern = re.compile(_SELF.format(name=re.escape(name)), re.MULTILINE)
    for method_name in owner.body.names:
        for block in owner.body.named(method_name):
            if not pattern.search(block.text):
                continue
            method = _main(block.parse())
            for node in ast.walk(method):
                if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node, "self"):
                    function = method if isinstance(method, ast.FunctionDef) else None
                    return ClassMember(owner, node, node.value, function)
    return None


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement defines at its own level."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _targets(node, "")
    return set()


def _targets(node: ast.Assign | ast.AnnAssign, of: str) -> set[str]:
    """The names that are assigned; with ``of``, the assigned attributes of the object ``of``."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    found = set()
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if not of and isinstance(each, ast.Name):
                found.add(each.id)
            if of and isinstance(each, ast.Attribute) and ast.unparse(each.value) == of:
                found.add(each.attr)
    return found

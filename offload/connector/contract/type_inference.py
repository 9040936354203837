"""Infers types of expressions from annotations."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.connector.contract.library import (
    CLASS,
    FUNCTION,
    MODULE,
    ClassMember,
    Definition,
    Library,
)

OBJECT, NAME, LIST, MAP, TUPLE, BOUND = "object", "name", "list", "map", "tuple", "bound"
_LISTS = frozenset(
    {"list", "Sequence", "Iterable", "Iterator", "tuple", "set", "frozenset", "deque", "Collection"}
)
_MAPS = frozenset({"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"})
_SAME = frozenset({"list", "tuple", "sorted", "iter", "set", "reversed", "filter"})


@dataclass(frozen=True)
class Type:
    """``OBJECT``: an instance of the class ``what``; ``NAME``: the class, function or module
    itself; ``BOUND``: a method, with its definition in ``member``; otherwise a container of
    ``parts``.
    """

    form: str
    what: Definition | None = None
    parts: tuple[Type | None, ...] = ()
    member: ClassMember | None = None

    @property
    def part(self) -> Type | None:
        """The type of the items of a list, or of the values of a map."""
        return self.parts[-1] if self.parts else None


class Types:
    """Reads types from the annotations of a library."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def of_annotation(self, module: str, node: ast.expr | None) -> Type | None:
        """The type that an annotation in a module denotes."""
        if node is None:
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.of_annotation(module, ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            return next(filter(None, (self.of_annotation(module, side) for side in sides)), None)
        if isinstance(node, ast.Subscript):
            return self._of_generic(module, node)
        found = self.library.expression(module, node)
        if found is None:
            return None
        if found.kind == CLASS:
            return Type(OBJECT, found)
        value = getattr(found.node, "value", None)  # an alias
        alias = value if isinstance(value, ast.expr) and not isinstance(value, ast.Call) else None
        return self.of_annotation(found.module, alias) if alias is not node else None

    def _of_generic(self, module: str, node: ast.Subscript) -> Type | None:
        name = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice
        parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
        if name in ("Optional", "Union", "ClassVar", "Final", "Annotated"):
            return next(filter(None, (self.of_annotation(module, each) for each in parts)), None)
        if name == "type":
            found = self.of_annotation(module, parts[0])
            return replace(found, form=NAME) if found and found.form == OBJECT else None
        types = tuple(self.of_annotation(module, each) for each in parts)
        if name in _MAPS:
            return Type(MAP, parts=types)
        if name == "tuple" and len(types) > 1 and ast.unparse(parts[1]) != "...":
            return Type(TUPLE, parts=types)
        if name in _LISTS:
            return Type(LIST, parts=types[:1])
        return self.of_annotation(module, node.value)

    def of_returned(self, module: str, node: ast.stmt | None) -> Type | None:
        """The type that a function returns."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return self.of_annotation(module, node.returns)
        return None

    def of_member(self, member: ClassMember) -> Type | None:
        """The type of a member of a class, seen from an object."""
        node, module = member.node, member.owner.module
        if isinstance(node, ast.AnnAssign):
            return self.of_annotation(module, node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if decorators & {"property", "cached_property"}:
                return self.of_returned(module, node)
            return Type(BOUND, member.owner, member=member)
        if member.method is not None and isinstance(member.value_of, ast.Name):
            for argument in (*member.method.args.args, *member.method.args.kwonlyargs):
                if argument.arg == member.value_of.id:
                    return self.of_annotation(module, argument.annotation)
        if member.method is not None and isinstance(member.value_of, ast.Call):
            found = self.library.expression(module, member.value_of.func)
            if found is not None and found.kind == CLASS:
                return Type(OBJECT, found)
        return None

    def of_name(self, module: str, name: str) -> Type | None:
        """The type of a name at the top of a module."""
        found = self.library.resolve(module, name)
        if found is None:
            return None
        annotation = getattr(found.node, "annotation", None)
        if isinstance(annotation, ast.expr):
            return self.of_annotation(found.module, annotation) or Type(NAME, found)
        return Type(NAME, found)


class Scope:
    """The names in one function, and the types of its expressions."""

    def __init__(self, types: Types, module: str, names: Mapping[str, Type | None]) -> None:
        self.types = types
        self.module = module
        self.names = dict(names)
        self.narrowed: dict[str, list[Type]] = {}

    def bind_name(self, name: str, found: Type | None) -> None:
        """Set the type of a name; ``None`` if it is not known."""
        self.names[name] = found

    def of(self, node: ast.AST) -> Type | None:
        """The type of an expression; ``None`` if it is not known."""
        handler: Any = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        found: Type | None = handler(node) if handler is not None else None
        return found

    def _of_name(self, node: ast.Name) -> Type | None:
        if node.id in self.names:
            return self.names[node.id]
        return self.types.of_name(self.module, node.id)

    def _of_attribute(self, node: ast.Attribute) -> Type | None:
        base = self.of(node.value)
        if base is not None and base.form == NAME and base.what and base.what.kind == MODULE:
            return self.types.of_name(base.what.module, node.attr)
        found = self.find_member(node)
        if found is None:
            return None
        owner, member = found
        if base is not None and base.form == NAME and isinstance(member.node, ast.Assign):
            return Type(OBJECT, owner)  # a member of an enum
        return self.types.of_member(member)

    def find_member(self, node: ast.Attribute) -> tuple[Definition, ClassMember] | None:
        """The class of the object, and the member that is read from it."""
        base = self.of(node.value)
        known = [base] if base is not None else []
        for each in (*known, *self.narrowed.get(ast.unparse(node.value), ())):
            if each.form in (OBJECT, NAME) and each.what is not None and each.what.is_class:
                member = self.types.library.member(each.what, node.attr)
                if member is not None:
                    return each.what, member
        return None

    def _of_call(self, node: ast.Call) -> Type | None:
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            if node.func.id in _SAME and node.args:
                return self.of(node.args[-1])
            if node.func.id == "next" and node.args:
                found = self.of(node.args[0])
                return found.part if found else None
            if node.func.id == "enumerate" and node.args:
                found = self.of(node.args[0])
                return Type(LIST, parts=(Type(TUPLE, parts=(None, found.part if found else None)),))
            if node.func.id == "zip":
                parts = tuple(f.part if (f := self.of(arg)) else None for arg in node.args)
                return Type(LIST, parts=(Type(TUPLE, parts=parts),))
        if isinstance(node.func, ast.Attribute):
            base = self.of(node.func.value)
            if base is not None and base.form == MAP:
                return _of_map_method(node.func.attr, base)
        return self._returned(self.of(node.func))

    def _returned(self, called: Type | None) -> Type | None:
        if called is None or called.what is None:
            return None
        if called.form == BOUND and called.member is not None:
            return self.types.of_returned(called.member.owner.module, called.member.node)
        if called.form == NAME and called.what.kind == CLASS:
            return Type(OBJECT, called.what)
        if called.form == NAME and called.what.kind == FUNCTION:
            return self.types.of_returned(called.what.module, called.what.node)
        return None

    def _of_subscript(self, node: ast.Subscript) -> Type | None:
        base = self.of(node.value)
        if base is None or base.form not in (LIST, MAP, TUPLE):
            return None
        if isinstance(node.slice, ast.Slice):
            return base
        if base.form == TUPLE and isinstance(node.slice, ast.Constant):
            index = node.slice.value
            is_inside = isinstance(index, int) and -len(base.parts) <= index < len(base.parts)
            return base.parts[index] if is_inside and isinstance(index, int) else None
        return base.part

    def _of_boolop(self, node: ast.BoolOp) -> Type | None:
        return next(filter(None, map(self.of, node.values)), None)

    def _of_ifexp(self, node: ast.IfExp) -> Type | None:
        return self.of(node.body) or self.of(node.orelse)

    def _of_tuple(self, node: ast.Tuple) -> Type | None:
        return Type(TUPLE, parts=tuple(map(self.of, node.elts)))

    def _of_list(self, node: ast.List) -> Type | None:
        found = [
            self.of(each.value if isinstance(each, ast.Starred) else each) for each in node.elts
        ]
        return Type(LIST, parts=(next(filter(None, found), None),))

    def _of_listcomp(self, node: ast.ListComp) -> Type | None:
        return Type(LIST, parts=(self.of(node.elt),))

    _of_generatorexp = _of_listcomp

    # -- what binds names --------------------------------------------------------------------

    def learn(self, node: ast.AST) -> None:
        """Record what a statement or comprehension reveals about the types of names."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, self.of(node.value))
        elif isinstance(node, ast.AnnAssign):
            self.bind(node.target, self.types.of_annotation(self.module, node.annotation))
        elif isinstance(node, ast.NamedExpr):
            self.bind(node.target, self.of(node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            found = self.of(node.iter)
            is_many = found is not None and found.form == LIST
            self.bind(node.target, found.part if found is not None and is_many else None)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            self._narrow(node)

    def bind(self, target: ast.AST, found: Type | None) -> None:
        """Give the target this type from now on, unless it already has a better one."""
        if isinstance(target, ast.Name) and (found is not None or target.id not in self.names):
            self.names[target.id] = found
        elif isinstance(target, ast.Tuple):
            parts = found.parts if found is not None and found.form == TUPLE else ()
            for index, each in enumerate(target.elts):
                self.bind(each, parts[index] if index < len(parts) else None)

    def _narrow(self, node: ast.Call) -> None:
        """Handle ``isinstance``: the object may also be one of these types."""
        if len(node.args) != 2:
            return
        text = ast.unparse(node.args[0])
        for each in ast.walk(node.args[1]):
            if isinstance(each, ast.Name | ast.Attribute):
                found = self.of(each)
                if found is not None and found.what is not None and found.what.is_class:
                    self.narrowed.setdefault(text, []).append(replace(found, form=OBJECT))


def _of_map_method(name: str, base: Type) -> Type | None:
    if name == "values":
        return Type(LIST, parts=(base.part,))
    if name == "items":
        return Type(LIST, parts=(Type(TUPLE, parts=base.parts),))
    return base.part if name in ("get", "pop", "setdefault") else None

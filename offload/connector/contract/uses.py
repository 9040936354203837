"""Derives from our own source the names of vLLM that this package uses.

Types are followed along annotations (ours and vLLM's), so that ``vllm_config.cache_config`` leads
to fields of ``CacheConfig``. Names that annotations do not reveal are listed in ``declared.toml``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from offload.connector.contract.facts import AnyFunction
from offload.connector.contract.library import CLASS, MODULE, Definition, Library
from offload.connector.contract.source import PackageSource
from offload.connector.contract.type_inference import BOUND, NAME, OBJECT, Scope, Type, Types

VLLM = "vllm"
OURS = "offload/connector/"
IMPORTED, TYPING, READ, CALLED, OVERRIDDEN, SUBCLASSED = (
    *("imported", "typing", "read", "called", "overridden", "subclassed"),
)


@dataclass(frozen=True, order=True)
class CallShape:
    """The number of positional arguments and the keywords of a call. ``is_open``: the call has
    ``*`` or ``**``, so it may pass anything."""

    positional: int
    keywords: tuple[str, ...] = ()
    is_open: bool = False


@dataclass(frozen=True)
class Use:
    """One line of our source that uses something of vLLM."""

    how: str
    line: str
    call: CallShape | None = None
    ours: str = ""
    """Our method, as ``module:Class.method``, if it overrides one of vLLM's."""


@dataclass
class Uses:
    """All uses by what is used: ``module:name``, ``Class.member``, ``Class()`` for its constructor
    and ``Class:base`` for subclassing it. ``classes`` maps each class to the name by which it is
    reached."""

    by_key: dict[str, list[Use]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, use: Use) -> None:
        known = self.by_key.setdefault(key, [])
        if use not in known:
            known.append(use)

    def reach(self, class_name: str, at: str) -> None:
        """Record how a class is reached. The first way counts."""
        self.classes.setdefault(class_name, at)


def derive(ours: PackageSource, library: Library, skipped: frozenset[str] = frozenset()) -> Uses:
    """Our uses of the vLLM in ``library``, which also contains our own source. Files in ``skipped``
    are for other versions of vLLM."""
    uses = Uses()
    readers = [
        _Reader(path, ours.read(path) or "", library, uses)
        for path in ours.paths()
        if path.startswith(OURS) and path not in skipped and "/contract/" not in path
    ]
    for reader in readers:  # names that are imported are the best paths to their classes
        reader.imports()
    for reader in readers:
        reader.read()
    return uses


class _Reader:
    """Reads one of our files."""

    def __init__(self, path: str, text: str, library: Library, uses: Uses) -> None:
        self._path = path
        self._module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._tree = ast.parse(text)
        self._library = library
        self._types = Types(library)
        self._uses = uses

    def _line(self, node: ast.stmt | ast.expr) -> str:
        return f"{self._path}:{node.lineno}"

    # -- imports -----------------------------------------------------------------------------

    def imports(self) -> None:
        """Record every name that is imported from vLLM."""
        self._imports(self._tree, is_typing=False)

    def _imports(self, parent: ast.AST, *, is_typing: bool) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for child in node.body:
                    self._import(child, is_typing="and" not in ast.unparse(node.test))
                for child in node.orelse:
                    self._import(child, is_typing=is_typing)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                self._import(node, is_typing=is_typing)
            else:
                self._imports(node, is_typing=is_typing)

    def _import(self, node: ast.AST, *, is_typing: bool) -> None:
        how = TYPING if is_typing else IMPORTED
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == VLLM:
                    self._uses.add(alias.name, Use(how, self._line(node)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == VLLM:
            for alias in node.names:
                self._uses.add(f"{node.module}:{alias.name}", Use(how, self._line(node)))
                found = self._library.resolve(node.module or "", alias.name)
                if found is not None and found.is_class:
                    self._uses.reach(found.name, f"{node.module}:{alias.name}")

    # -- classes and functions ---------------------------------------------------------------

    def read(self) -> None:
        """Record every other use."""
        self._block(self._tree.body, {}, None)

    def _block(
        self, body: list[ast.stmt], names: Mapping[str, Type | None], owner: Definition | None
    ) -> None:
        scope = Scope(self._types, self._module, names)
        inner: list[ast.stmt] = []
        nodes = [node for stmt in body for node in _outside_functions(stmt, inner)]
        if names:
            for node in nodes:
                if isinstance(node, ast.ImportFrom):
                    self._learn_import(scope, node)
        for _ in range(2):  # in a loop, a name can be bound below its first use
            for node in nodes:
                scope.learn(node)
        for node in nodes:
            self._note(scope, node)
        for each in inner:
            if isinstance(each, ast.ClassDef):
                self._class(each)
            elif isinstance(each, AnyFunction):
                self._function(each, scope, owner)

    def _learn_import(self, scope: Scope, node: ast.ImportFrom) -> None:
        for alias in node.names:
            found = self._library.resolve(node.module or "", alias.name)
            scope.bind_name(alias.asname or alias.name, Type(NAME, found) if found else None)

    def _function(self, node: AnyFunction, scope: Scope, owner: Definition | None) -> None:
        names: dict[str, Type | None] = dict(scope.names) if owner is None else {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            names[argument.arg] = self._types.of_annotation(self._module, argument.annotation)
        if owner is not None and arguments and arguments[0].annotation is None:
            is_class = any(ast.unparse(each) == "classmethod" for each in node.decorator_list)
            names[arguments[0].arg] = Type(NAME if is_class else OBJECT, owner)
        if not names:
            names["self"] = None  # any value, so that this counts as a function
        self._block(node.body, names, None)

    def _class(self, node: ast.ClassDef) -> None:
        owner = self._library.resolve(self._module, node.name)
        if owner is None or not owner.is_class:
            return
        for base in self._library.lineage(owner):
            if base.module.partition(".")[0] == VLLM and base.name in self._uses.classes:
                self._uses.add(f"{base.name}:base", Use(SUBCLASSED, self._line(node)))
        for each in node.body:
            self._override(owner, each)
        self._block(node.body, {}, owner)

    def _override(self, owner: Definition, node: ast.stmt) -> None:
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else None
        for base in self._library.lineage(owner) if name else ():
            if base.module.partition(".")[0] != VLLM or base.name not in self._uses.classes:
                continue
            if self._library.member(base, str(name)) is not None:
                ours = f"{owner.module}:{owner.name}.{name}"
                how = OVERRIDDEN if isinstance(node, AnyFunction) else READ
                self._uses.add(f"{base.name}.{name}", Use(how, self._line(node), ours=ours))
                return

    # -- expressions -------------------------------------------------------------------------

    def _note(self, scope: Scope, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self._attribute(scope, node)
        elif isinstance(node, ast.Call):
            self._call(scope, node)

    def _attribute(self, scope: Scope, node: ast.Attribute) -> None:
        base = scope.of(node.value)
        if base is None or base.what is None:
            return
        if base.form == NAME and base.what.kind == MODULE:
            if base.what.module.partition(".")[0] == VLLM:
                self._uses.add(f"{base.what.module}:{node.attr}", Use(READ, self._line(node)))
            return
        found = scope.find_member(node)
        if found is not None:
            self._member(found[0], found[1].owner, node)
        elif base.form == OBJECT and _is_vllm(base.what):
            self._member(base.what, base.what, node)  # vLLM has no such name

    def _member(self, known_as: Definition, owner: Definition, node: ast.Attribute) -> None:
        """Record a use of a member of a class of vLLM. A class of ours is treated as its base class
        in vLLM."""
        if not _is_vllm(owner):
            return
        name = known_as if _is_vllm(known_as) else self._base_with(known_as, node.attr) or owner
        self._reach(name)
        self._uses.add(f"{name.name}.{node.attr}", Use(READ, self._line(node)))

    def _base_with(self, ours: Definition, member: str) -> Definition | None:
        for base in self._library.lineage(ours):
            if base.name in self._uses.classes and self._library.member(base, member) is not None:
                return base
        return None

    def _reach(self, found: Definition) -> None:
        self._uses.reach(found.name, f"{found.module}:{found.name}")

    def _call(self, scope: Scope, node: ast.Call) -> None:
        call = CallShape(
            sum(not isinstance(each, ast.Starred) for each in node.args),
            tuple(sorted(each.arg for each in node.keywords if each.arg)),
            any(isinstance(each, ast.Starred) for each in node.args)
            or any(each.arg is None for each in node.keywords),
        )
        use = Use(CALLED, self._line(node), call)
        if ast.unparse(node.func) == "super().__init__":
            return
        if ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            self._getattr(scope, node)
        called = scope.of(node.func)
        if called is None or called.what is None or not _is_vllm(called.what):
            return
        if called.form == BOUND and isinstance(node.func, ast.Attribute):
            found = scope.find_member(node.func)
            if found is not None and _is_vllm(found[0]):
                self._uses.add(f"{found[0].name}.{node.func.attr}", use)
        elif called.form == NAME and called.what.kind == CLASS:
            self._reach(called.what)
            self._uses.add(f"{called.what.name}()", use)
        elif called.form == NAME:
            key = self._imported_as(called.what)
            self._uses.add(key, use)

    def _getattr(self, scope: Scope, node: ast.Call) -> None:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            read = ast.Attribute(node.args[0], name.value, ast.Load())
            self._note(scope, ast.copy_location(read, node))

    def _imported_as(self, found: Definition) -> str:
        for key in self._uses.by_key:
            module, _, name = key.partition(":")
            if name == found.name and self._library.resolve(module, name) == found:
                return key
        return f"{found.module}:{found.name}"


def _is_vllm(found: Definition) -> bool:
    return found.module.partition(".")[0] == VLLM


def _outside_functions(node: ast.AST, inner: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the node and its descendants, except functions and classes, which are handled later.
    Their decorators, defaults and annotations are ignored."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        inner.append(node)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_functions(child, inner)

"""One owner per field: only its own methods change an object, its attributes and what they contain.

Types are not inferred. An attribute is known by its name, and its content by the annotations and
values that our classes give it. A method that returns a container of its object is known by its
name and its annotation. So a module may write to the records that it defines, and a container that
a function receives as an argument is not checked.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.imports import python_files, tree_of
from tests.test_tidy import PRODUCT, module_of

NOT_OURS = {
    "offload.cli: found.name": "a command of click",
    "offload.cli.plain_help: parameter.default": "an option of click",
    "policies.simulation.jobs: _counter.value": "a number that processes share (multiprocessing)",
}
"""Assignments to attributes of other libraries' objects, which share a name with one of ours."""


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Names of the attributes that a class has by its body and by assignments to ``self``."""
    names = {
        node.id
        for stmt in cls.body
        if isinstance(stmt, ast.Assign | ast.AnnAssign)
        for target in (stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target])
        for node in ast.walk(target)
        if isinstance(node, ast.Name)
    }
    for stmt in cls.body:
        if isinstance(stmt, ast.Assign) and ast.unparse(stmt.targets[0]) == "__slots__":
            names |= set(ast.literal_eval(stmt.value))
    return names | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def written_from_outside(trees: dict[str, ast.Module]) -> list[str]:
    """The assignments to attributes of objects whose class is in another of these modules.

    A module may write to its own records (nodes of a list, for example), and a class to itself.
    Classes are known by the names of their attributes, types are not inferred.
    """
    owners: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for name in attributes_of(cls):
                owners.setdefault(name, set()).add(module)
    found = []
    for module, tree in trees.items():
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            whose = ast.unparse(node.value)
            is_own = whose in ("self", "cls") or module in owners.get(node.attr, set())
            is_module = whose.partition(".")[0] in imported
            if node.attr in owners and not is_own and not is_module:
                found.append(f"{module}: {whose}.{node.attr}")
    return found


def test_no_attribute_is_set_from_outside_the_object() -> None:
    trees = {module_of(path): tree_of(path) for path in python_files(*PRODUCT)}
    assert sorted(set(written_from_outside(trees))) == sorted(NOT_OURS)


def test_attributes_set_from_outside_are_found() -> None:
    owner = ast.parse(
        "@dataclass\nclass Job:\n    done: bool = False\n    def end(self) -> None:\n"
        "        self.done = True\n\ndef all_end(job: Job) -> None:\n    job.done = True\n"
    )
    user = ast.parse(
        "def f(job, self):\n    job.done = True\n    self.job.done |= job.done\n"
        "    a, job.done = 1, 2\n    del self.jobs[0].done\n    job.unknown = 1\n"
        "    self.done = True\n"
    )
    found = ["job.done", "job.done", "self.job.done", "self.jobs[0].done"]
    assert sorted(written_from_outside({"a": owner, "b": user})) == [f"b: {n}" for n in found]


SET_BY_NAME = {
    "offload.connector.compat.worker_sleep: Worker": "vLLM's class, which lacks two hooks",
    "offload.connector.model.adapters: module": "vLLM's module, whose function finds adapters",
    "offload.connector.model.files_at_start: ModelConfig": "vLLM's class, which has no such hook",
    "offload.connector.model.probe: parallel_state": "vLLM's module, while a model is probed",
    "policies.base: cls": "its own subclasses",
}


def set_by_name(trees: dict[str, ast.Module]) -> list[str]:
    """The objects whose attributes are set or deleted by functions that take the name as text."""
    functions = ("setattr", "delattr", "object.__setattr__", "object.__delattr__")
    return [
        f"{module}: {ast.unparse(node.args[0])}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
        if ast.unparse(node.args[0]) != "self"
    ]


OF_NAMED_TUPLES = ("_replace", "_make", "_asdict", "_fields")
"""Public methods of ``NamedTuple``, in spite of their names."""


def private_names_used(trees: dict[str, ast.Module]) -> list[str]:
    """The private names of one module that another module imports, reads or calls. Names that
    begin with a single underscore are private."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for scope in (tree, *classes_in(tree)):
            defined = {n.name for n in scope.body if isinstance(n, AnyFunction | ast.ClassDef)}
            for name in defined | (
                attributes_of(scope) if isinstance(scope, ast.ClassDef) else set()
            ):
                owners[name].add(module)
    found = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "") in trees:
                names = {f"{node.module}.{each.name}": each.name for each in node.names}
                names = {whole: name for whole, name in names.items() if whole not in trees}
            elif isinstance(node, ast.Attribute) and module not in owners.get(node.attr, {module}):
                names = {ast.unparse(node): node.attr}
            else:
                continue
            found += [
                f"{module}: {whole}"
                for whole, name in names.items()
                if re.match("_[^_]", name) and name not in OF_NAMED_TUPLES
                if not whole.startswith(("self.", "super()")) or whole.count(".") > 1
            ]
    return found


def test_no_attribute_is_set_by_its_name() -> None:
    trees = {module_of(path): tree_of(path) for path in python_files(*PRODUCT)}
    assert sorted(set(set_by_name(trees))) == sorted(SET_BY_NAME)


def test_no_private_name_of_another_module_is_used() -> None:
    trees = {module_of(path): tree_of(path) for path in python_files(*PRODUCT)}
    assert private_names_used(trees) == []


def test_private_names_and_attributes_set_by_name_are_found() -> None:
    owner = ast.parse(
        "class Job:\n    def __init__(self):\n        self._done = 0\n"
        "    def _end(self): self._done = 1\ndef _f(job): job._end()\n"
    )
    user = ast.parse(
        "from a import Job, _f\ndef g(job, self):\n    job._end()\n    setattr(job, 'x', 1)\n"
        "    self.job._done\n    self._theirs\n    object.__setattr__(self, 'y', 2)\n"
    )
    trees = {"a": owner, "b": user}
    assert sorted(private_names_used(trees)) == ["b: a._f", "b: job._end", "b: self.job._done"]
    assert set_by_name(trees) == ["b: job"]


# -- items -----------------------------------------------------------------------------------

WRITERS = {
    "dict": "clear pop popitem setdefault update move_to_end subtract",
    "list": "append clear extend insert pop remove reverse sort",
    "set": "add clear difference_update discard intersection_update pop remove update",
    "deque": "append appendleft clear extend extendleft pop popleft remove rotate",
}
"""The methods that change a container."""
KINDS = {"defaultdict": "dict", "OrderedDict": "dict", "Counter": "dict"} | {n: n for n in WRITERS}
DISPLAYS = {
    (ast.Dict, ast.DictComp): "dict",
    (ast.List, ast.ListComp): "list",
    (ast.Set, ast.SetComp): "set",
}
ITEM = "an item"

ALLOWED = {
    "policies.adaptive: self._tree.segments.of": "the policy removes keys without a call per key",
}


@dataclass
class Content:
    """The content of attributes of one name: kinds of containers, and methods of our classes."""

    modules: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)

    def is_written_by(self, how: str) -> bool:
        """True if this method (or ``ITEM``) changes a container and is not a method of our
        classes."""
        if how in self.methods or (how == ITEM and "__setitem__" in self.methods):
            return False
        return any(how == ITEM or how in WRITERS[kind].split() for kind in self.kinds)


def type_name(node: ast.AST | None) -> str:
    """The name of the class in an annotation or of a new object, or an empty string."""
    for types, kind in DISPLAYS.items():
        if isinstance(node, types):
            return kind
    if isinstance(node, ast.Call):
        factory = next((k.value for k in node.keywords if k.arg == "default_factory"), node.func)
        return type_name(factory)
    if isinstance(node, ast.Subscript):
        return type_name(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def classes_in(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def parameters_of(cls: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The annotations of the constructor's parameters."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return {each.arg: each.annotation for each in (*node.args.args, *node.args.kwonlyargs)}
    return {}


def given_to(cls: ast.ClassDef) -> Iterator[tuple[str, ast.AST | None]]:
    """The attributes of a class with their annotations and values."""
    parameters = parameters_of(cls)
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.annotation
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
            if isinstance(value, ast.Name) and parameters.get(value.id) is not None:
                value = parameters[value.id]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, value
            elif isinstance(target, ast.Name) and node in cls.body:
                yield target.id, value


def contents_of(trees: dict[str, ast.Module]) -> dict[str, Content]:
    """The content of the attributes of our classes, by name."""
    methods: dict[str, set[str]] = defaultdict(set)
    for tree in trees.values():
        for cls in classes_in(tree):
            methods[cls.name] |= {n.name for n in cls.body if isinstance(n, ast.FunctionDef)}
    contents: dict[str, Content] = defaultdict(Content)
    for module, tree in trees.items():
        for cls in classes_in(tree):
            for name in attributes_of(cls):
                contents[name].modules.add(module)
            for name, value in given_to(cls):
                kind = type_name(value)
                contents[name].kinds |= {KINDS[kind]} if kind in KINDS else set()
                contents[name].methods |= methods.get(kind, set())
    return contents


def changed_in(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The expressions whose items are set or deleted, or on which a method is called, and how.
    ``name |= other`` changes the container that the name is bound to."""
    whole: ast.expr
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            whole, how = node.value, ITEM
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whole, how = node.func.value, node.func.attr
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            whole, how = node.target, ITEM
        else:
            continue
        while isinstance(whole, ast.Subscript):
            whole = whole.value
        yield whole, how


def names_in(scope: ast.AST, *, of_self: bool) -> dict[str, ast.expr]:
    """The names (or attributes of ``self``) that are bound once, to an attribute or a call."""
    bound: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Attribute if of_self else ast.Name):
                    bound[ast.unparse(name)].append(value)
    return {
        name: values[0]
        for name, values in bound.items()
        if len(values) == 1 and isinstance(values[0], ast.Attribute | ast.Call)
    }


def returned_by(method: AnyFunction) -> bool:
    """True if a method returns a container that its object keeps, or one of the items of such a
    container."""
    for node in ast.walk(method):
        value: ast.expr | None = node.value if isinstance(node, ast.Return) else None
        while isinstance(value, ast.Subscript):
            value = value.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            value = value.func.value if value.func.attr in ("get", "setdefault") else None
        if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
            return type_name(method.returns) in KINDS
    return False


def containers_returned(trees: dict[str, ast.Module]) -> dict[str, Content]:
    """The containers that methods and properties of our classes return, and could be changed, by
    the name of the method."""
    found: dict[str, Content] = defaultdict(Content)
    for module, tree in trees.items():
        for cls in classes_in(tree):
            for method in (node for node in cls.body if isinstance(node, AnyFunction)):
                if returned_by(method):
                    found[method.name].modules.add(module)
                    found[method.name].kinds.add(KINDS[type_name(method.returns)])
    return found


def contents_changed_from_outside(trees: dict[str, ast.Module]) -> list[str]:
    """The containers that are changed by other classes than their owner, through an attribute, a
    local name, or an attribute of ``self`` that is bound to an attribute, a parameter, or the
    result of a method."""
    contents, returned = contents_of(trees), containers_returned(trees)
    found = set()
    for module, tree in trees.items():
        functions = [n for n in ast.walk(tree) if isinstance(n, AnyFunction)]
        for scope, names in [
            *((each, names_in(each, of_self=False)) for each in functions),
            *((each, names_in(each, of_self=True)) for each in classes_in(tree)),
        ]:
            for whole, how in changed_in(scope):
                whole = names.get(ast.unparse(whole), whole)
                named: ast.expr = whole
                known = contents
                if isinstance(whole, ast.Call):
                    named, known = whole.func, returned
                if not isinstance(named, ast.Attribute):
                    continue
                content = known.get(named.attr) or returned.get(named.attr)
                if content is None:
                    continue
                is_own = ast.unparse(named.value) in ("self", "cls")
                if not is_own and module not in content.modules and content.is_written_by(how):
                    found.add(f"{module}: {ast.unparse(whole)}")
        for cls in classes_in(tree):
            found |= {f"{module}: {name}" for name in changed_parameters(cls)}
    return sorted(found)


AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def changed_parameters(cls: ast.ClassDef) -> set[str]:
    """The attributes of a class that are containers passed to its constructor, and that it
    changes."""
    parameters = parameters_of(cls)
    passed = {
        ast.unparse(target): KINDS[kind]
        for node in ast.walk(cls)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if (kind := type_name(parameters.get(node.value.id))) in KINDS
    }
    return {
        name
        for whole, how in changed_in(cls)
        if (name := ast.unparse(whole)) in passed
        and (how == ITEM or how in WRITERS[passed[name]].split())
    }


def test_no_container_is_changed_from_outside_the_object() -> None:
    trees = {module_of(path): tree_of(path) for path in python_files(*PRODUCT)}
    assert contents_changed_from_outside(trees) == sorted(ALLOWED)


OWNER = """
class Log:
    def add(self, key): ...

class Jobs:
    lines: Log
    def of_day(self, day: int) -> set[int]:
        return self.days[day]

    def copied(self, day: int) -> set[int]:
        return set(self.days[day])

    @property
    def left(self) -> list[int]:
        return self._left

    def __init__(self, taken: deque[int]) -> None:
        self.open: dict[int, int] = {}
        self.done = set()
        self.log = Log()
        self.taken = taken

def own(jobs: Jobs) -> None:
    jobs.open[1] = 2
"""


def test_containers_changed_from_outside_are_found() -> None:
    user = """
class User:
    def __init__(self, jobs):
        self.theirs = jobs.open
        self.mine = {}

    def reads(self, jobs):
        jobs.log.add(1)
        jobs.lines.add(1)
        jobs.open.get(1)
        self.mine[1] = 2
        jobs.copied(1).add(1)
        return jobs.open[1]
"""
    trees = {"a": ast.parse(OWNER), "b": ast.parse(user)}
    assert contents_changed_from_outside(trees) == []
    for line, name in (
        ("jobs.open[1] = 2", "jobs.open"),
        ("jobs.open[1] += 2", "jobs.open"),
        ("del self.jobs[0].open[1][2]", "self.jobs[0].open"),
        ("jobs.open.pop(1)", "jobs.open"),
        ("jobs.done.add(1)", "jobs.done"),
        ("local, other = jobs.done, 1; local.add(1)", "jobs.done"),
        ("jobs.taken.popleft()", "jobs.taken"),
        ("self.theirs[1] = 2", "jobs.open"),
        ("jobs.of_day(1).add(2)", "jobs.of_day(1)"),
        ("local = jobs.done; local |= {2}", "jobs.done"),
        ("local = jobs.of_day(1); local -= {2}", "jobs.of_day(1)"),
        ("local = jobs.of_day(1); local.update([2])", "jobs.of_day(1)"),
        ("jobs.left.append(2)", "jobs.left"),
    ):
        trees["b"] = ast.parse(f"{user}    def writes(self, jobs):\n        {line}\n")
        assert contents_changed_from_outside(trees) == [f"b: {name}"], line
    trees["a"] = ast.parse(OWNER + "class Taker(Jobs):\n    def take(self): self.taken.pop()\n")
    trees["b"] = ast.parse("")
    assert contents_changed_from_outside(trees) == []
    trees["a"] = ast.parse(OWNER.replace("= taken\n", "= taken\n        self.taken.pop()\n"))
    assert contents_changed_from_outside(trees) == ["a: self.taken"]

"""Reads the imports of this project's code from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MODULE_IN_TEXT = re.compile(r"(\w+(?:\.\w+)+)(?::\w+)?")


def python_files(*folders: str) -> list[Path]:
    return sorted(
        p for f in folders for p in (ROOT / f).rglob("*.py") if "__pycache__" not in p.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under ``if TYPE_CHECKING:``, which never run."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack.extend(node.orelse)
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that the file imports when it runs, also inside functions."""
    yield from _imports_in(without_type_checking(tree_of(path)), path)


def all_imports_of(path: Path) -> Iterator[str]:
    """Dotted names that the file imports, also for type checking alone, and those that it contains
    as text (``"package.module"`` or ``"package.module:Class"``), for ``importlib``."""
    nodes = list(ast.walk(tree_of(path)))
    yield from _imports_in(nodes, path)
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    yield from (named[1] for text in texts if (named := _MODULE_IN_TEXT.fullmatch(text)))


def _imports_in(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join((*package, module)).rstrip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules_imported(path: Path, modules: Container[str]) -> set[str]:
    """The ``modules`` from which the file imports, also for type checking alone.
    ``from package import module`` counts as an import of the module."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in full}
    return {name for name in found if name in modules}


def files_that_import(package: str, *folders: str) -> list[Path]:
    """Test files below ``tests`` that import something from ``package``, directly or through other
    modules of these folders, including imports inside functions."""
    modules = {_module(path): path for path in python_files(*folders)}
    direct = {name: set(imports_of(path)) for name, path in modules.items()}
    tests = [name for name, path in modules.items() if path.name.startswith("test_")]
    return [modules[name] for name in tests if _reaches(name, package, direct)]


def _module(path: Path) -> str:
    name = path.relative_to(ROOT).with_suffix("")
    return ".".join(name.parts[:-1] if name.name == "__init__" else name.parts)


def _reaches(name: str, package: str, direct: Mapping[str, set[str]]) -> bool:
    seen: set[str] = set()
    left = [name]
    while left:
        for each in _with_parents(left.pop()):
            if each in direct and each not in seen:
                seen.add(each)
                left.extend(direct[each])
    return any(f"{each}.".startswith(f"{package}.") for found in seen for each in direct[found])


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))

"""The structure of the code: import arrows, sizes, and what product code must not contain.

The limits are ratchets: lower them when the code allows, never raise them to let something in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("offload", "tiers", "policies")
OURS = (*PRODUCT, "bench", "demo", "tests", "examples")

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500
STILL_LONG = {
    "tiers/testing.py": 402,
    "tests/connector/oracle_world.py": 464,
    "tests/connector/test_identity.py": 401,
    "tests/tiers/test_lmdb_recovery.py": 410,
}
"""Files above the limit and how long they may be; entries only shrink and go."""

MAY_IMPORT = {
    "tiers": {"tiers"},
    "policies": {"policies"},
    "offload": {"offload", "tiers", "policies"},
    "demo": {"demo", "offload"},
    "bench": {"bench", "demo", "offload", "tiers", "policies"},
}
"""Which of our packages each may import; tests may import everything."""

VLLM_IN = ("offload/connector/",)
TORCH_IN = (
    "offload/connector/",
    "offload/registry.py",
    "offload/device_digest.py",
    "offload/verify.py",
    "offload/manager_setup.py",  # takes the caller's tensors
    "tiers/slab.py",
    "tiers/descriptors.py",
    r"tiers/.*copy.*\.py",
    r"tiers/cuda_.*\.py",
)
ASYNCIO_IN = (
    "offload/executor.py",
    "offload/asker.py",  # these six run inside the executor's loop
    "offload/idle_scrub.py",
    "offload/load_task.py",
    "offload/staging.py",
    "offload/tier_watch.py",
    "offload/tier_writer.py",
    "offload/loop.py",
    "offload/manager.py",
    "tiers/",
)
ORDER_INSIDE_OFFLOAD = (
    ("keys", "plans", "errors"),
    ("index", "coordinator", "ledger", "layout"),
    ("manager", "executor", "planner"),
    ("connector",),
)
"""Modules of ``offload`` from the lowest; a module imports none of a later line."""

FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}


def python_files(*folders: str) -> list[Path]:
    return sorted(
        p for f in folders for p in (ROOT / f).rglob("*.py") if "__pycache__" not in p.parts
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``, which is never run."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            stack.extend(node.orelse)
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that the file imports when it runs, also inside functions."""
    for node in without_type_checking(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join((*package, module)).rstrip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(re.match(place, name_of(path)) for place in places)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_arrows_between_packages(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in python_files(package)
        for name in imports_of(path)
        if (top := name.partition(".")[0]) in OURS and top not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("library", "places"), [("vllm", VLLM_IN), ("torch", TORCH_IN), ("asyncio", ASYNCIO_IN)]
)
def test_libraries_stay_where_they_belong(library: str, places: tuple[str, ...]) -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in python_files(*PRODUCT)
        for name in imports_of(path)
        if name.partition(".")[0] == library and not is_in(path, places)
    ]
    assert wrong == []


def test_arrows_inside_offload() -> None:
    level = {m: number for number, modules in enumerate(ORDER_INSIDE_OFFLOAD) for m in modules}
    wrong = []
    for path in python_files("offload"):
        own = level.get(path.relative_to(ROOT / "offload").parts[0].removesuffix(".py"))
        for name in imports_of(path):
            parts = name.split(".")
            if own is not None and parts[0] == "offload" and len(parts) > 1:
                imported = level.get(parts[1])
                if imported is not None and imported > own:
                    wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in python_files(*PRODUCT, "bench", "demo"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert long == []


def test_files_have_one_subject() -> None:
    sizes = {name_of(p): len(p.read_text().splitlines()) for p in python_files(*OURS)}
    long = {n: lines for n, lines in sizes.items() if lines > STILL_LONG.get(n, FILE_LINES_MAX)}
    assert long == {}


def test_product_code_runs_no_data() -> None:
    wrong = []
    for path in python_files(*PRODUCT):
        wrong += [
            f"{name_of(path)} imports {name}"
            for name in imports_of(path)
            if name.partition(".")[0] in FORBIDDEN_IMPORTS
        ]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {ast.unparse(node.func)}")
    assert wrong == []


def test_nothing_depends_on_one_machine() -> None:
    """Paths of a developer's machine. ``/tmp`` is one too, outside of documentation."""
    machine_path = re.compile(r"""(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/""")
    files = python_files(*OURS)
    files += [p for s in ("*.md", "*.toml", "*.sh", "*.txt", "*.json") for p in ROOT.glob(s)]
    files += [p for s in ("docs", "scripts", ".ci") for p in (ROOT / s).rglob("*") if p.is_file()]
    files.append(ROOT / "run")
    wrong = [
        f"{name_of(path)}:{number}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if machine_path.search(line)
    ]
    assert wrong == []


def test_suppressions_give_their_reason() -> None:
    """``noqa`` and ``type: ignore`` carry a reason after their code."""
    bare = re.compile(r"#\s*(?:noqa(?::\s*[A-Z0-9, ]+)?|type:\s*ignore(?:\[[\w\-, ]+\])?)\s*$")
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in python_files(*PRODUCT, "bench", "demo", "tests")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert wrong == []


def test_broad_handlers_give_their_reason() -> None:
    """A handler of every exception ends with ``raise``, or says on its line or the next why not."""
    wrong = []
    for path in python_files(*PRODUCT, "bench", "demo"):
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                last = node.body[-1]
                reraised = isinstance(last, ast.Raise) and last.exc is None
                explained = "#" in lines[node.lineno - 1] or "#" in lines[node.lineno]
                if not reraised and not explained:
                    wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    return caught in ("Exception", "BaseException")

"""The structure of the code: order of imports, sizes, and what product code must not contain.

The limits are ratchets: lower them when the code allows, never raise them to let something in.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.imports import (
    ROOT,
    all_imports_of,
    imports_of,
    modules_imported,
    name_of,
    python_files,
    tree_of,
)

PRODUCT = ("offload", "tiers", "policies")
OURS = (*PRODUCT, "bench", "demo", "tests", "examples")

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500

ORDER = (
    # policies: which chunks to keep
    "policies.base policies.hints policies.sketch policies.options policies.safe_text",
    "policies.eviction",
    "policies.adaptive",
    "policies.guarded policies.admission policies.registry",
    "policies.simulation",
    "policies.testing",
    # tiers: where chunks are stored, and copies between there and the KV cache
    "tiers.cuda_driver tiers.base tiers.record tiers.tally",
    "tiers.io",
    "tiers.folders",
    "tiers.slab",
    "tiers.copy",
    "tiers.files",
    "tiers.lmdb.records",
    "tiers.lmdb.recovery",
    "tiers.lmdb",
    "tiers.lmdb.shared",
    "tiers.offline",
    "tiers.mooncake",
    "tiers.adapters",
    "tiers.authoring tiers.testing",
    # offload: deciding which chunks go where, and doing it
    "offload.errors offload.sizes offload.loop",
    "offload.namespaces",
    "offload.config",
    "offload.layout",
    "offload.messages",
    "offload.telemetry",
    "offload.index",
    "offload.planner",
    "offload.planner.look_ahead",
    "offload.planner.planner offload.planner.build",
    "offload.requests",
    "offload.geometry",
    "offload.worker",
    "offload.manager",
    "offload.admin",
    # offload.connector: all code that depends on vLLM
    "offload.connector.compat offload.connector.contract",
    "offload.connector.log offload.connector.guard offload.connector.vllm_cli",
    "offload.connector.model",
    "offload.connector.metadata",
    "offload.connector.worker",
    "offload.connector.scheduler",
    "offload.connector.startup_checks",
    "offload.connector.startup offload.connector.doctor",
    "offload.connector.serving",
    "offload.connector.cache_policy offload.connector.secondary_tier",
    "offload.connector.connector",
    "offload.connector offload.connector.plugin",
    # commands and measurements
    "offload.cli",
    "demo",
    "bench",
)
"""Packages and modules from the lowest to the highest: code imports from its own line and from the
lines before it. A module belongs to the longest name in this list with which its name begins."""

NEVER = (
    ("policies", "tiers"),  # the two must not depend on each other
    ("tiers", "policies"),
    ("demo", "tiers"),
    ("demo", "policies"),
    ("offload.connector.scheduler", "offload.connector.worker"),  # they run in two processes
)
"""Imports that the order would allow but that are wrong."""

NAMED_ONLY = (
    ("offload.config.kv_transfer_config", "offload.connector"),  # an option's value for vLLM
    ("offload.connector.model.probe", "offload.connector"),  # the same
)
"""Modules higher up that code names in a text without importing them."""

VLLM_IN = ("offload/connector/",)
TORCH_IN = (
    "offload/connector/",
    "offload/layout/registration.py",
    "offload/worker/device_digest.py",
    "offload/worker/block_verifier.py",
    "offload/worker/rank_memory.py",  # accepts the caller's tensors
    "tiers/slab/slab.py",
    "tiers/copy/",
    "tiers/testing/simulated_copy.py",
)
ASYNCIO_IN = (
    "offload/admin/export.py",
    "offload/worker/",
    "offload/loop.py",
    "offload/manager/",
    "offload/requests/background_writer.py",
    "tiers/",
)

FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}


def is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(re.match(place, name_of(path)) for place in places)


LEVELS = {name: level for level, line in enumerate(ORDER) for name in line.split()}
ROOTS = ("offload", "tiers", "policies")
"""The packages' own ``__init__`` modules: they only export, lazily, and may import what they
export."""


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str) -> str | None:
    """The longest name of ``ORDER`` that the module begins with."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVELS), None)


def is_part(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def test_every_module_has_its_place_in_the_order() -> None:
    modules = {module_of(path) for path in python_files(*PRODUCT, "bench", "demo")}
    assert [module for module in sorted(modules) if not package_of(module)] == sorted(ROOTS)
    packages = {package_of(module) for module in modules}
    assert sorted(LEVELS.keys() - packages) == [], "in the order, but not in the tree"


def test_tests_lie_in_the_same_tree_as_the_code() -> None:
    """``tests/tiers/shared`` has the tests that all shared tiers have in common."""
    packages = {path.parent.relative_to(ROOT) for path in python_files(*PRODUCT)}
    folders = {
        path.parent.relative_to(ROOT / "tests")
        for path in python_files(*(f"tests/{package}" for package in PRODUCT))
    }
    assert packages ^ folders == {Path("tiers/shared")}


def missing_in(docstring: str) -> list[str]:
    """Find which of the two sentences a docstring lacks. Each sentence begins a new line."""
    lines = docstring.splitlines()
    return [
        start
        for start in ("Owns ", "Must not know ")
        if sum(line.startswith(start) and line.endswith(".") for line in lines) != 1
    ]


def test_every_package_says_what_it_owns_and_what_it_must_not_know() -> None:
    wrong = []
    for path in python_files(*PRODUCT):
        if path.name == "__init__.py":
            docstring = ast.get_docstring(tree_of(path)) or ""
            wrong += [f"{module_of(path)}: no line {start!r}" for start in missing_in(docstring)]
    assert wrong == []


def test_a_package_that_does_not_say_it_is_found() -> None:
    assert missing_in("Owns a.\n\nMust not know b.") == []
    assert missing_in("Owns a.\n\nDoes not know b.") == ["Must not know "]
    assert missing_in("Owns a\nand b.\nMust not know c.") == ["Owns "]


def is_wrong_import(module: str, name: str) -> bool:
    package, other = package_of(module), package_of(name)
    if package is None or other is None:
        return False
    is_up = LEVELS[other] > LEVELS[package]
    return is_up or any(is_part(module, one) and is_part(name, two) for one, two in NEVER)


def test_imports_follow_the_order() -> None:
    """Includes imports inside functions, for type checking, and by ``importlib``."""
    wrong = {
        (module_of(path), name)
        for path in python_files(*PRODUCT, "bench", "demo")
        for name in all_imports_of(path)
        if is_wrong_import(module_of(path), name)
    }
    assert sorted(wrong) == sorted(NAMED_ONLY)


@pytest.mark.parametrize(
    "text",
    [
        "import tiers.lmdb.tier",
        "from tiers import lmdb",
        "from .lmdb import tier",
        "def f():\n    from tiers.lmdb.tier import LmdbTier",
        "if TYPE_CHECKING:\n    import tiers.lmdb",
        "importlib.import_module('tiers.lmdb.tier')",
        "TABLE = {'lmdb': 'tiers.lmdb.tier:LmdbTier'}",
    ],
)
def test_upward_imports_of_every_form_are_found(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.imports.ROOT", tmp_path)
    (tmp_path / "tiers").mkdir()
    path = tmp_path / "tiers/record.py"
    path.write_text(text)
    assert any(is_wrong_import("tiers.record", name) for name in all_imports_of(path))


def test_only_imports_for_type_checking_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("if TYPE_CHECKING:\n    import torch\nif not TYPE_CHECKING:\n    import vllm")
    assert list(imports_of(path)) == ["vllm"]


def test_no_import_is_circular() -> None:
    """Includes imports for type checking, and imports through other modules."""
    modules = {module_of(path): path for path in python_files(*PRODUCT, "bench", "demo")}
    left = {name: modules_imported(path, modules) for name, path in modules.items()}
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert {name: sorted(needed & left.keys()) for name, needed in left.items()} == {}


def defined_in(tree: ast.Module) -> set[str]:
    """The names that a module binds at its top level, also below ``if`` and ``try``."""
    names: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return names


def test_imported_names_exist() -> None:
    """Includes tests that only a GPU runs, and imports inside functions."""
    modules = {module_of(path): path for path in python_files(*OURS)}
    packages = {name.rpartition(".")[0] for name in modules}
    defined: dict[str, set[str]] = {}
    missing = []
    for path in modules.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                wanted = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted = [(node.module, alias.name) for alias in node.names]
            else:
                continue
            for module, name in wanted:
                if module.partition(".")[0] not in OURS:
                    continue
                if module not in modules and module not in packages:
                    missing.append(f"{path}:{node.lineno}: no module {module}")
                elif (
                    name
                    and f"{module}.{name}" not in modules
                    and f"{module}.{name}" not in packages
                ):
                    if module not in defined:
                        defined[module] = defined_in(tree_of(modules[module]))
                    if name not in defined[module]:
                        missing.append(f"{path}:{node.lineno}: no {name} in {module}")
    assert not missing, missing


def test_no_constant_is_bound_twice() -> None:
    """The second binding at the top level of a module would silently replace the first."""
    wrong = []
    for path in python_files(*OURS):
        seen = set[str]()
        for node in tree_of(path).body:
            if isinstance(node, ast.AnnAssign):
                targets = [node.target] if node.value else []
            else:
                targets = node.targets if isinstance(node, ast.Assign) else []
            nodes = [inner for target in targets for inner in ast.walk(target)]
            names = [
                n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            constants = {name for name in names if name.isupper()}
            wrong += [f"{name_of(path)}:{node.lineno}: {name}" for name in constants & seen]
            seen |= constants
    assert wrong == []


def classes_of(tree: ast.Module) -> list[str]:
    """The names of the classes and type aliases that a module defines, also inside functions."""
    return [
        node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias")
    ]


def named_twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for name in classes_of(tree):
            modules.setdefault(name, []).append(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_two_classes_have_the_same_name() -> None:
    """A name in a log, a traceback or a search then identifies one class."""
    assert named_twice({module_of(p): tree_of(p) for p in python_files(*PRODUCT)}) == {}


def test_two_classes_of_one_name_are_found() -> None:
    one, two = ast.parse("class Job: ..."), ast.parse("Job: TypeAlias = int\nKey: str = ''")
    assert named_twice({"a": one, "b": two, "c": ast.parse("")}) == {"Job": ["a", "b"]}


def test_product_code_imports_no_tests() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in python_files(*PRODUCT, "bench", "demo")
        for name in imports_of(path)
        if name.partition(".")[0] in ("tests", "examples")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("library", "places"), [("vllm", VLLM_IN), ("torch", TORCH_IN), ("asyncio", ASYNCIO_IN)]
)
def test_libraries_stay_where_they_belong(library: str, places: tuple[str, ...]) -> None:
    """For vLLM, includes imports for type checking."""
    imports = all_imports_of if library == "vllm" else imports_of
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in python_files(*PRODUCT)
        for name in imports(path)
        if name.partition(".")[0] == library and not is_in(path, places)
    ]
    assert wrong == []


def depends_on_a_version(tree: ast.Module) -> bool:
    """True if code reads vLLM's version as numbers, or tries whether vLLM has a name."""
    return any(
        (
            isinstance(node, ast.Name | ast.alias | ast.Attribute)
            and "__version_tuple__" in ast.unparse(node)
        )
        or (isinstance(node, ast.Try) and any(map(imports_vllm, ast.walk(node))))
        for node in ast.walk(tree)
    )


def imports_vllm(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == "vllm"
    return isinstance(node, ast.Import) and any(
        each.name.partition(".")[0] == "vllm" for each in node.names
    )


def test_differences_between_versions_of_vllm_are_in_one_package() -> None:
    wrong = [
        name_of(path)
        for path in python_files("offload", "bench", "demo")
        if not is_in(path, ("offload/connector/compat/", "offload/connector/contract/"))
        and depends_on_a_version(tree_of(path))
    ]
    assert wrong == []
    assert depends_on_a_version(ast.parse("from vllm.version import __version_tuple__"))
    assert depends_on_a_version(ast.parse("try:\n    import vllm.x\nexcept ImportError:\n    pass"))
    assert not depends_on_a_version(ast.parse("import vllm\nprint(vllm.__version__)"))


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in python_files(*PRODUCT, "bench", "demo"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert long == []


def test_files_are_not_too_long() -> None:
    sizes = {name_of(p): len(p.read_text().splitlines()) for p in python_files(*OURS)}
    long = {n: lines for n, lines in sizes.items() if lines > FILE_LINES_MAX}
    assert long == {}


def test_product_code_executes_no_data() -> None:
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
    """No file may contain paths of a developer's machine. This includes ``/tmp``, except in
    documentation."""
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
    """``noqa`` and ``type: ignore`` must be followed by a reason."""
    bare = re.compile(r"#\s*(?:noqa(?::\s*[A-Z0-9, ]+)?|type:\s*ignore(?:\[[\w\-, ]+\])?)\s*$")
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in python_files(*OURS, "scripts")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert wrong == []


def test_broad_handlers_give_their_reason() -> None:
    """A handler for every exception must end with ``raise``, or give the reason on its line or the
    next."""
    wrong = []
    for path in python_files(*OURS, "scripts"):
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

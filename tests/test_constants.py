"""Names of numbers: one name has one value in a package, and says what kind of number it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.imports import python_files, tree_of
from tests.test_tidy import PRODUCT, module_of

ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Attribute, ast.Load)


def is_number(value: ast.expr) -> bool:
    """True if an expression is a number, or computed from at least one number."""
    numbers = False
    for node in ast.walk(value):
        if isinstance(node, ast.Constant):
            numbers = type(node.value) in (int, float)
            if not numbers:
                return False
        elif not isinstance(node, ARITHMETIC):
            return False
    return numbers


def bound_in(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The public constants of a module and their values."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id.isupper() and name.id[0] != "_":
                    yield name.id, value


def numbers_named_twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The constants that are numbers and that two modules of one top-level package define."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for name, value in bound_in(tree):
            if is_number(value):
                found[f"{module.partition('.')[0]}: {name}"].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def trees_of(*packages: str) -> dict[str, ast.Module]:
    return {module_of(path): tree_of(path) for path in python_files(*packages)}


def test_a_numeric_constant_has_one_value_in_a_package() -> None:
    assert numbers_named_twice(trees_of(*PRODUCT)) == {}


def test_numbers_with_one_name_are_found() -> None:
    trees = {
        "tiers.a": ast.parse("WAIT_S = 2.0\nBATCH, OTHER = 1 << 20, 'text'\nLOCK = 'a'"),
        "tiers.b": ast.parse("WAIT_S = 3.0\nOTHER = 2\nLOCK = 'b'\n_PART = 1"),
        "tiers.c": ast.parse("BATCH = 4 * KIB\n_PART = 2"),
        "offload.d": ast.parse("WAIT_S = 4.0"),
    }
    found = {"tiers: WAIT_S": ["tiers.a", "tiers.b"], "tiers: BATCH": ["tiers.a", "tiers.c"]}
    assert numbers_named_twice(trees) == found


def value_of(node: ast.expr) -> float:
    """The value of a number or of a quotient of two numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return value_of(node.left) / value_of(node.right)
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return float(node.value)


def test_a_share_is_a_fraction() -> None:
    shares = {
        f"{module}: {name}": value_of(value)
        for module, tree in trees_of(*PRODUCT).items()
        for name, value in bound_in(tree)
        if name.endswith("_SHARE")
    }
    assert len(shares) >= 10
    assert {name: value for name, value in shares.items() if not 0 < value <= 1} == {}


NAMES_OF_OPTIONS = {"MAX_LOAD_TOKENS", "max_load_tokens", "max_pinned_share"}
NAMES_OF_VLLM = {"max_tokens", "max_model_len"}


def bounds_that_begin_with_max(trees: dict[str, ast.Module]) -> set[str]:
    """The constants and parameters that are called ``max_x`` instead of ``x_max``."""
    found = set()
    for module, tree in trees.items():
        names = {name for name, _ in bound_in(tree)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names -= NAMES_OF_OPTIONS | NAMES_OF_VLLM
        bounds = ("max_", "min_", "_max_", "_min_")
        found |= {f"{module}: {name}" for name in names if name.lower().startswith(bounds)}
    return found


def test_bounds_end_in_max_or_min() -> None:
    assert bounds_that_begin_with_max(trees_of(*PRODUCT)) == set()
    user = ast.parse("MIN_BYTES = 3\ndef f(*, max_waiting, waiting_max): ...")
    assert bounds_that_begin_with_max({"a": user}) == {"a: MIN_BYTES", "a: max_waiting"}

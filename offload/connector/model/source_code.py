"""Finds the names that a model's code can read: those in its source file and in the files that it
imports.

Some settings affect the forward pass of a few models only: Llama 4 scales its queries from position
8,191 on if ``max_model_len`` is above 32,768. There is no list of such models: a setting counts if
its name occurs in the model's source. Code that cannot be found, or that instantiates other models
named only in its configuration, is assumed to read everything.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger(__name__)

MODELS = "vllm.model_executor.models"
_FAMILIES = "vllm.models"
COMMON = frozenset(
    f"{MODELS}.{name}"
    for name in ("adapters", "config", "interfaces", "interfaces_base", "registry", "utils")
)
"""Modules from which nearly every model imports some function.
`tests/offload/connector/model/test_identity_sweep.py` checks which settings these modules read
themselves."""
_STARTS_OTHERS = frozenset({"init_vllm_registered_model", "with_hf_config", "initialize_model"})
_ENVIRONMENT = ("os.getenv", "os.environ", "os.environ.get", "environ.get", "getenv")


@dataclass(frozen=True)
class CodeNames:
    """Every identifier in a source, every string with the form of one, and the environment
    variables that the code reads.

    ``whole`` is false if the code may contain more names.
    """

    names: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    whole: bool = True

    def may_read(self, *words: str) -> bool:
        """True if a name that contains one of these words occurs in the code, or may occur."""
        return not self.whole or any(word in name for name in self.names for word in words)


UNKNOWN = CodeNames(whole=False)


def names_in(model: ModelConfig) -> CodeNames:
    """The names in this model's code. Reads source files; never raises."""
    if model.multimodal_config is not None:
        return UNKNOWN  # its inner text model may be named only in the configuration
    try:
        architecture = str(model.architecture)
        entry = ModelRegistry.models.get(architecture)
        if entry is None:
            return UNKNOWN
        module = getattr(entry, "module_name", None) or entry.model_cls.__module__
        found = _closure(str(module))
        hook = MODELS_CONFIG_MAP.get(architecture)
        sources = [inspect.getsource(hook)] if hook is not None else []
        return _joined([found, *(_names(ast.parse(source), "").found for source in sources)])
    except Exception as error:  # third-party code may be registered here
        logger.info("kvtiers: cannot find out which settings the model's code reads: %r", error)
        return UNKNOWN


@cache
def _closure(module: str) -> CodeNames:
    """All names of a module and of the related modules that it imports."""
    seen: set[str] = set()
    waiting, found = [module], []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        source = _source(name)
        if source is None:
            return UNKNOWN
        parsed = _names(ast.parse(source.read_text()), _package(name, source))
        found.append(parsed.found)
        waiting += (each for each in parsed.imports if _is_kin(each, module) and _source(each))
    joined = _joined(found)
    return UNKNOWN if joined.names & _STARTS_OTHERS else joined


@dataclass(frozen=True)
class _Parsed:
    found: CodeNames
    imports: frozenset[str]


def _names(tree: ast.Module, package: str) -> _Parsed:
    names, variables, imports = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():  # not a message or a docstring
                names.add(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(_imported(node, package))
        variables |= set(_variables(node))
    return _Parsed(CodeNames(frozenset(names), frozenset(variables)), frozenset(imports))


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = package.split(".")
        above = above[: len(above) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _variables(node: ast.AST) -> Iterator[str]:
    """Names of environment variables that the code reads by a literal name."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _ENVIRONMENT:
        keys: Iterable[ast.expr] = node.args[:1]
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in _ENVIRONMENT:
        keys = [node.slice]
    else:
        return
    yield from (
        key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def _is_kin(name: str, module: str) -> bool:
    """True if the module ``name`` belongs to the code of a model in ``module``: another model of
    vLLM, or a part of the same third-party package."""
    if name in COMMON:
        return False
    if module.startswith("vllm."):
        return name.startswith((f"{MODELS}.", f"{_FAMILIES}."))
    return name.partition(".")[0] == module.partition(".")[0]


@cache
def _source(module: str) -> Path | None:
    """The source file of a module, found without importing it; ``None`` if there is none."""
    top, _, rest = module.partition(".")
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None


def _package(module: str, source: Path) -> str:
    return module if source.name == "__init__.py" else module.rpartition(".")[0]


def _joined(found: Iterable[CodeNames]) -> CodeNames:
    parts = list(found)
    if not all(part.whole for part in parts):
        return UNKNOWN
    return CodeNames(
        frozenset().union(*(part.names for part in parts)),
        frozenset().union(*(part.variables for part in parts)),
    )

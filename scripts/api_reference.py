"""Writes ``docs/reference/api.md`` from the docstrings of the public names.

    python scripts/api_reference.py

It reads the source without importing it. A public package or module lists its names in ``__all__``;
for a module without ``__all__``, only the docstring is shown.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"

HEAD = """# The Python API

The names and import paths on this page are public, and so are the command line (`kvtiers`), the
configuration and the formats on disk. Everything else is private by convention, whatever its name:
it may change in any version without notice. The packages carry `py.typed`.

`offload`, `policies` and `tiers` export what users import. Authors of policies and tiers also need
`policies.hints` and `tiers.authoring`, and test their classes with `policies.testing` and
`tiers.testing`. Each of these modules has a section below.

`import offload, policies, tiers` is cheap: it imports neither torch nor vllm. Names that need
torch are imported on first use.

Some names stand in a configuration instead of an import statement:

| path | where it is named |
|---|---|
| `offload.connector` | `kv_connector_module_path`: [Serving](../guides/serve.md) |
| `offload.connector.connector` | the same, in earlier configurations |
| `offload.connector.plugin:register` | vLLM's plugin, found by its entry point |
| `offload.connector.cache_policy` | [Under vLLM's own offloading](../guides/vllm-native.md) |
| `offload.connector.secondary_tier` | the same |
| `offload.cli:main` | the command `kvtiers` |

Earlier programs import some names from the modules below. These paths stay valid; new code uses the
packages, and `make_policy("adaptive")` for the default policy:

KEPT_PATHS

Generated: `python scripts/api_reference.py`.
"""

MODULES = (
    "offload",
    "policies",
    "policies.hints",
    "policies.testing",
    "tiers",
    "tiers.authoring",
    "tiers.testing",
)
"""The public modules, in the order of the page."""
KEPT_PATHS = {
    "offload.manager": ("OffloadManager", "SimpleConfig", "SimpleGroup", "SimpleSpec"),
    "policies.adaptive": ("AdaptivePolicy",),
    "policies.base": ("AdmissionPolicy", "EntryInfo", "EvictionPolicy", "Key", "RemoveCause"),
    "tiers.base": (
        *("ALIGNMENT", "Buffer", "Key", "ReadOutcome", "Scrubbed", "SharedTier", "StoredKey"),
        *("StoredKeys", "Tier", "TierClosedError", "TierError", "TierInfo", "TierIoError"),
        *("WriteOutcome", "stored_keys"),
    ),
    "tiers.record": (
        *("HEADER_BYTES", "Identity", "check_identity", "check_key", "check_payload"),
        *("check_records", "seal", "verify"),
    ),
}
"""Import paths that stay valid, and the public names of each. Other names of these modules are
private."""
CONTRACTS = {"policies.testing": ("PolicyContract", "synthetic_trace"), "policies.hints": ()}
"""The public names of modules that have no ``__all__``."""


HIDDEN = "Use ``open``"
"""Constructors whose docstring begins like this are private."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Entry(NamedTuple):
    """One public name: its node, and for a constant the string that documents it."""

    module: str
    name: str
    node: ast.AST
    doc: str

    @property
    def key(self) -> tuple[str, str]:
        """A key that is equal for two names of the same object."""
        return self.module, self.name


def source_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def tree_of(module: str) -> ast.Module:
    """The parsed source of a module."""
    return ast.parse(source_of(module).read_text())


def public_names(module: str) -> list[str]:
    """The public names of a module."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return list(CONTRACTS[module])


def find(module: str, name: str) -> Entry:
    """Follow imports to the definition of a name. Raises ``LookupError``."""
    tree = tree_of(module)
    for node, after in with_next(tree.body):
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return Entry(module, name, node, ast.get_docstring(node) or "")
        if name in assigned(node):
            return Entry(module, name, node, string_of(after))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    for found in imports:
        if name in {alias.asname or alias.name for alias in found.names}:
            return find(found.module or "", name)
    raise LookupError(f"{module} does not define {name}")


def with_next(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Pairs of each statement with the one that follows it."""
    yield from zip(body, [*body[1:], None], strict=True)


def assigned(node: ast.stmt) -> list[str]:
    """The names that a statement assigns."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def string_of(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string, or an empty text."""
    value = node.value if isinstance(node, ast.Expr) else None
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return inspect.cleandoc(value.value)
    return ""


def markdown(doc: str) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", doc)


def parameters(node: Function) -> list[str]:
    """The parameters of a function, as in the source."""
    found = node.args
    plain = [*found.posonlyargs, *found.args]
    shown = [parameter(arg) for arg in plain]
    for n, default in enumerate(reversed(found.defaults), 1):
        shown[-n] = parameter(plain[-n], default)
    if found.vararg:
        shown.append("*" + parameter(found.vararg))
    elif found.kwonlyargs:
        shown.append("*")
    shown += map(parameter, found.kwonlyargs, found.kw_defaults)
    return shown + (["**" + parameter(found.kwarg)] if found.kwarg else [])


def parameter(arg: ast.arg, default: ast.expr | None = None) -> str:
    """One parameter with its type and its default."""
    typed = f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else arg.arg
    if default is None:
        return typed
    return f"{typed}{' = ' if arg.annotation else '='}{ast.unparse(default)}"


def signature(node: Function, *, is_method: bool) -> str:
    """A function's name, parameters and result."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    shown = parameters(node)[int(is_method and "staticmethod" not in decorators) :]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in decorators:
        return f"{node.name}{result.replace(' -> ', ': ', 1)}"
    begin = "class method " if "classmethod" in decorators else ""
    begin += "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{begin}{node.name}({', '.join(shown)}){result}"


def members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The public members of a class, each with its signature and docstring."""
    for item, after in with_next(node.body):
        if isinstance(item, Function):
            doc, shown = ast.get_docstring(item) or "", signature(item, is_method=True)
            if item.name == "__init__" and not doc.startswith(HIDDEN):
                yield shown.replace("__init__", node.name).removesuffix(" -> None"), doc
            elif not item.name.startswith(("_", "test_")):
                yield shown, doc
        else:
            for name in assigned(item):
                if not name.startswith("_"):
                    yield ast.unparse(item), string_of(after)


def inherited(entry: Entry) -> set[str]:
    """The names of all members that are documented in base classes."""
    found: set[str] = set()
    for base in entry.node.bases if isinstance(entry.node, ast.ClassDef) else ():
        try:
            plain = base.value if isinstance(base, ast.Subscript) else base
            parent = find(entry.module, ast.unparse(plain))
        except (LookupError, OSError):  # defined in another library
            continue
        if isinstance(parent.node, ast.ClassDef):
            found |= {item.name for item in parent.node.body if isinstance(item, Function)}
            found |= inherited(parent)
    return found


def shown_members(entry: Entry) -> Iterator[tuple[str, str]]:
    """The members of a class, without overrides that are documented in a base class."""
    assert isinstance(entry.node, ast.ClassDef)
    overrides = inherited(entry)
    for shown, doc in members(entry.node):
        name = re.search(r"(\w+)\(", shown)
        if doc or name is None or name[1] not in overrides:
            yield shown, doc


def undocumented(entry: Entry) -> list[str]:
    """List the missing docstrings of a public name. The docstring of a class documents its plain
    fields."""
    missing = [] if entry.doc else [f"{entry.module}.{entry.name}"]
    if isinstance(entry.node, ast.ClassDef):
        missing += [
            f"{entry.module}.{entry.name}: {shown}"
            for shown, doc in shown_members(entry)
            if not doc and re.match(r"[\w ]+\(", shown) and not shown.startswith(entry.name)
        ]
    return missing


def described(entry: Entry) -> str:
    """Make the section of one public name."""
    node = entry.node
    lines = [f"### `{entry.name}`", ""]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        shown = f"class {entry.name}({bases})" if bases else f"class {entry.name}"
    elif isinstance(node, Function):
        shown = signature(node, is_method=False)
    else:
        shown = ast.unparse(node)
    lines += [f"`{shown}`", "", markdown(entry.doc), ""]
    if isinstance(node, ast.ClassDef):
        for written, doc in shown_members(entry):
            text = textwrap.indent(markdown(doc), "  ").strip()
            lines.append(f"* `{written}`" + (f"\n\n  {text}\n" if text else ""))
        lines.append("")
    return "\n".join(lines)


def kept_paths() -> str:
    """Make the table of the import paths that stay valid."""
    rows = (
        f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |"
        for module, names in KEPT_PATHS.items()
    )
    return "\n".join(("| module | names |", "|---|---|", *rows))


def page() -> str:
    """Make the whole page."""
    parts = [HEAD.replace("KEPT_PATHS", kept_paths())]
    described_already = set[tuple[str, str]]()
    for module in MODULES:
        parts.append(f"## `{module}`\n\n{markdown(ast.get_docstring(tree_of(module)) or '')}\n")
        entries = [find(module, name) for name in public_names(module)]
        known = [f"`{entry.name}`" for entry in entries if entry.key in described_already]
        if known:
            parts.append(f"Described above: {', '.join(known)}.\n")
        parts += [described(entry) for entry in entries if entry.key not in described_already]
        described_already |= {entry.key for entry in entries}
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

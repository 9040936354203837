"""Checks that every path, module, name, link and decision in the documentation exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.scripts import load_script
from tests.test_tidy import ORDER

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COLUMNS_MAX = 140
PACKAGES = ("offload", "tiers", "policies", "bench", "demo", "examples", "tests")
FOLDERS = (*PACKAGES, "docs", "scripts", ".ci", "requirements")

NOT_OURS = frozenset(
    {
        *("AttentionGroup", "BlockPool", "SimpleCPUOffloadConnector", "multi_modal_uuids"),  # vLLM
        "unpin_blocks",
        "map_kv_cache_to_kernel_blocks",
        *("MADV_POPULATE_WRITE", "MDB_MAP_FULL", "client_ttl"),  # Linux, LMDB, Mooncake
        *("expand_groups", "trim_to_common"),  # removed; decision 0084 says why
    }
)
"""Names that the documentation mentions although our code does not contain them."""


EXAMPLE_FILES = frozenset({"my_policy.py", "test_my_policy.py", "my_tier.py", "test_my_tier.py"})
"""Files that a guide asks its reader to create."""

PATH = re.compile(r"(?:[\w.-]+/)*[\w.*-]+\.(?:py|sh|toml|md|json|yaml|png|svg)")
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    """The page without fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def spans_of(page: Path) -> Iterator[str]:
    for match in re.finditer(r"(`{1,2})(?!`)(.+?)\1", prose_of(page), re.S):
        yield " ".join(match[2].split())


@cache
def files() -> tuple[str, ...]:
    skipped = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
    found += [p for p in ROOT.iterdir() if p.is_file()]
    return tuple(name_of(p) for p in found if not skipped & set(p.parts))


@cache
def words_of_code() -> frozenset[str]:
    """Every word of the code and of the files beside it, without the documentation."""
    found = set[str]()
    for name in files():
        if (
            name.endswith((".py", ".sh", ".toml", ".json", ".yaml"))
            and name != "tests/test_docs.py"
        ):
            found.update(re.findall(r"\w+", (ROOT / name).read_text(encoding="utf-8")))
    for name in ("run", "pyproject.toml", ".ci/run"):
        found.update(re.findall(r"\w+", (ROOT / name).read_text(encoding="utf-8")))
    return frozenset(found)


@cache
def names_in(module: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top level, and the strings of its exports."""
    found = set[str]()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found.add(inner.id)
            elif isinstance(inner, ast.alias):
                found.add(inner.asname or inner.name)
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                found.add(inner.value)
    return frozenset(found)


def exists_dotted(name: str) -> bool:
    """True if the dotted name exists: ``tiers.base`` is a module, ``tiers.base.Tier`` a name in
    one."""
    path = ROOT
    parts = name.split(".")
    for index, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
        elif (path / f"{part}.py").is_file():
            rest = parts[index + 1 :]
            return not rest or rest[0] in names_in(path / f"{part}.py")
        else:
            return index > 0 and part in names_in(path / "__init__.py")
    return True


def exists_file(name: str, page: Path) -> bool:
    """True if the file exists, relative to the root or to the page, or anywhere if it is a plain
    name."""
    if (ROOT / name).exists() or (page.parent / name).exists():
        return True
    if "*" in name:
        return any((ROOT / folder).glob(name) for folder in ("", *FOLDERS)) or any(ROOT.glob(name))
    return "/" not in name and any(Path(file).name == name for file in files())


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pages
def test_paths_exist(page: Path) -> None:
    mentioned = {m for span in spans_of(page) for m in PATH.findall(span) if PATH.fullmatch(span)}
    ours = {m for m in mentioned if m.split("/")[0] in FOLDERS or m.endswith(".py")}
    assert sorted(m for m in ours - EXAMPLE_FILES if not exists_file(m, page)) == []


@pages
def test_modules_exist(page: Path) -> None:
    mentioned = {m for span in spans_of(page) for m in DOTTED.findall(span)}
    paths = {m for m in mentioned if m.rpartition(".")[2] in ("py", "md", "json", "jsonl", "sh")}
    assert sorted(m for m in mentioned - paths if not exists_dotted(m)) == []


@pages
def test_names_exist(page: Path) -> None:
    """A name in code type that looks like an identifier must occur in the code."""
    identifier = re.compile(r"[A-Z][a-z]\w+|[A-Z]+_[A-Z_]+|_?[a-z0-9]+_\w+")
    mentioned = {
        part
        for span in spans_of(page)
        if NAME.fullmatch(span.removesuffix("()")) and not PATH.fullmatch(span)
        for part in span.removesuffix("()").split(".")
        if identifier.fullmatch(part)
    }
    assert sorted(mentioned - words_of_code() - NOT_OURS) == []


@pages
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    ours = {link.partition("#")[0] for link in links if "://" not in link}
    assert sorted(link for link in ours - {""} if not (page.parent / link).exists()) == []


@pages
def test_decisions_exist(page: Path) -> None:
    kept = {path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")}
    named = set(re.findall(r"(?<![\w.,-])(00\d\d)(?![\w.,-]*\d)", prose_of(page)))
    assert sorted(named - kept) == []


def test_every_decision_begins_with_its_date_and_state() -> None:
    wrong = []
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        begin = path.read_text(encoding="utf-8").split("\n\n")[1]
        if not re.match(r"20\d\d-\d\d-\d\d[^.]*\. Accepted\.", begin):
            wrong.append(path.name)
    assert wrong == []


def test_code_names_decisions_that_exist() -> None:
    kept = {path.name[:4] for path in (ROOT / "docs/decisions").glob("*.md")}
    wrong = []
    for name in files():
        if name.endswith((".py", ".sh", ".toml")) and name != "tests/test_docs.py":
            source = (ROOT / name).read_text(encoding="utf-8")
            named = re.findall(r"[Dd]ecisions?(?: |/|\n\s*#?\s*)(00\d\d)", source)
            wrong += [f"{name}: {number}" for number in named if number not in kept]
    assert wrong == []


def test_the_pictures_are_what_their_sources_draw() -> None:
    drawing = load_script("draw_architecture")
    assert sorted(path.stem for path in drawing.DOCS.glob("*.svg")) == sorted(drawing.NAMES)
    for name in drawing.NAMES:
        kept = (drawing.DOCS / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == drawing.draw(drawing.read(name)), "run scripts/draw_architecture.py"


def test_every_package_is_in_the_picture_and_in_the_text() -> None:
    packages = {name for line in ORDER for name in line.split()}
    drawing = load_script("draw_architecture")
    source = drawing.read("architecture")
    placed = [box for frame in source["frames"] for row in frame["rows"] for box in row]
    boxes = [name for names, _ in placed for name in names.split()]
    assert len(boxes) == len(set(boxes)), "a package in two boxes"
    assert sorted(packages - set(boxes)) == [], "not in the picture"
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Packages")[2].partition("## One block")[0]
    assert sorted(packages - set(re.findall(r"`([\w.]+)`", table))) == [], "not in the table"


def layout_problems(text: str) -> list[str]:
    """Lines of a page that are too long, and words with more than one space between them. Tables,
    fenced blocks, and lines that are one link or path are exempt."""
    found = []
    for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M).splitlines():
        if line.startswith("|"):
            continue
        if len(line) > COLUMNS_MAX and len(line.split()) > 1:
            found.append(f"longer than {COLUMNS_MAX} columns: {line}")
        if re.search(r"(?<=\S)  +(?=\S)", line):
            found.append(f"more than one space between words: {line}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_have_the_usual_length(page: Path) -> None:
    if "reference" not in page.parts:  # generated
        assert layout_problems(page.read_text(encoding="utf-8")) == []


def test_wrong_layout_is_detected() -> None:
    assert len(layout_problems("a word " * 21 + "\n")) == 1
    assert len(layout_problems("two  spaces\n")) == 1
    assert layout_problems("| a  table " * 21 + "\n```\nthe  code\n```\n") == []

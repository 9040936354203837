"""Every kind of break, planted in a small package and in a wheel made from it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from offload.connector.contract.check import check, our_parameters
from offload.connector.contract.compare import Break, breaks
from offload.connector.contract.declared import Callers, Declared, Order
from offload.connector.contract.library import Library
from offload.connector.contract.snapshots import (
    TESTED,
    Contract,
    contract_of,
    minor_of,
    nearest_tested,
    snapshot_versions,
)
from offload.connector.contract.source import PackageSource, SourceError, open_source
from tests.offload.connector.contract.sources import Edited, Texts

VLLM = {
    "vllm/__init__.py": "from .version import __version__\n",
    "vllm/version.py": "try:\n    from ._version import __version__\nexcept ImportError:\n"
    '    __version__ = "dev"\n',
    "vllm/_version.py": "__version__ = version = '7.1.0'\n",
    "vllm/config/__init__.py": "from .whole import Config as Config\n",
    "vllm/config/whole.py": '''"""A docstring.
class NotAClass: it only begins a line
"""
from dataclasses import dataclass, field
from enum import Enum

class Place(Enum):
    HERE = "here"
    THERE = "there"

@dataclass
class Inner:
    size: int = 16
    layers: "list[str]" = field(default_factory=list)

@dataclass
class Config:
    inner: Inner
    role: Place = Place.HERE

    @property
    def total(self) -> int:
        return self.inner.size

def plan(config: Config, blocks: int, *, align: int = 8) -> list[Inner]:
    return [config.inner] * blocks
''',
    "vllm/base.py": """from abc import ABC, abstractmethod

class Base(ABC):
    def begin(self, config, tokens=0) -> bool:
        return True

    @abstractmethod
    def end(self, config) -> None: ...
""",
    "vllm/runner.py": """class Runner:
    def step(self, output):
        self.connector.begin(output, tokens=3)
        self.zero_blocks(output.blocks)
        if output.last:
            self.connector.end(output)
""",
}
OURS = {
    "offload/__init__.py": "",
    "offload/connector/__init__.py": "",
    "offload/connector/ours.py": """from __future__ import annotations
from typing import TYPE_CHECKING
from vllm.base import Base
from vllm.config.whole import Place, plan
if TYPE_CHECKING:
    from vllm.config import Config

class Ours(Base):
    def begin(self, config: Config, tokens: int = 0) -> bool:
        first, *_ = plan(config, 3, align=4)
        inner = config.inner
        return inner.size > 3 and config.role is Place.HERE and bool(config.total)

    def end(self, config: Config) -> None:
        for layer in config.inner.layers:
            print(layer)
        for each in plan(config, 1):
            print(each.size)
""",
}
TABLE = Declared(
    apart=(),
    members=(),
    names=(),
    orders=(
        Order(
            "a step",
            "vllm.runner:Runner.step",
            frozenset({"begin", "zero_blocks", "end"}),
            "offload/connector/ours.py:begin",
        ),
    ),
    callers=(Callers("Base", "", r"\bconnector", ("vllm/",), ()),),
)

PLANTED = {
    "renamed parameter": (
        "vllm/config/whole.py",
        ("align: int = 8", "alignment: int = 8"),
        "vllm.config.whole:plan: parameter align is gone (alignment is new)",
        "offload/connector/ours.py:10",
        True,
    ),
    "new parameter that must be given": (
        "vllm/config/whole.py",
        ("blocks: int, *", "blocks: int, memory: int, *"),
        "vllm.config.whole:plan: parameter memory is new and must be given",
        "offload/connector/ours.py:17",
        True,
    ),
    "changed default": (
        "vllm/config/whole.py",
        ("align: int = 8", "align: int = 16"),
        "vllm.config.whole:plan: the default of align is 16, it was 8",
        "offload/connector/ours.py:17",
        False,
    ),
    "changed answer": (
        "vllm/config/whole.py",
        ("-> list[Inner]", "-> tuple[list[Inner], int]"),
        "vllm.config.whole:plan: returns tuple[list[Inner], int], it was list[Inner]",
        "offload/connector/ours.py:10",
        False,
    ),
    "removed field": (
        "vllm/config/whole.py",
        ('    layers: "list[str]" = field(default_factory=list)\n', ""),
        "Inner.layers: is gone",
        "offload/connector/ours.py:15",
        True,
    ),
    "changed default of a field": (
        "vllm/config/whole.py",
        ("size: int = 16", "size: int = 32"),
        "Inner.size: is 32, it was 16",
        "offload/connector/ours.py:12",
        False,
    ),
    "changed enum value": (
        "vllm/config/whole.py",
        ('HERE = "here"', 'HERE = "local"'),
        "vllm.config.whole:Place: member HERE is 'local', it was 'here'",
        "offload/connector/ours.py:4",
        True,
    ),
    "removed import": (
        "vllm/config/whole.py",
        ("def plan(", "def plan_all("),
        "vllm.config.whole:plan: is gone",
        "offload/connector/ours.py:4",
        True,
    ),
    "hook with a new parameter": (
        "vllm/base.py",
        ("def begin(self, config, tokens=0)", "def begin(self, config, tokens=0, late=False)"),
        "Base.begin: parameter late is new, and our method does not accept it",
        "offload/connector/ours.py:9",
        True,
    ),
    "new abstract method": (
        "vllm/base.py",
        (
            "class Base(ABC):\n",
            "class Base(ABC):\n    @abstractmethod\n    def sleep(self): ...\n\n",
        ),
        "Base:base: must have a method sleep now",
        "offload/connector/ours.py:8",
        True,
    ),
    "new method": (
        "vllm/base.py",
        ("class Base(ABC):\n", "class Base(ABC):\n    def sleep(self):\n        return True\n\n"),
        "Base:base: has a new method sleep, which we inherit",
        "offload/connector/ours.py:8",
        False,
    ),
    "reordered hook": (
        "vllm/runner.py",
        (
            "        self.connector.begin(output, tokens=3)\n"
            "        self.zero_blocks(output.blocks)\n",
            "        self.zero_blocks(output.blocks)\n"
            "        self.connector.begin(output, tokens=3)\n",
        ),
        "order of vllm.runner:Runner.step: the order is zero_blocks, begin, end; it was begin, "
        "zero_blocks, end",
        "offload/connector/ours.py:9",
        True,
    ),
    "hook under another condition": (
        "vllm/runner.py",
        ("if output.last:", "if output.last and output.ready:"),
        "order of vllm.runner:Runner.step: end is called if output.last and output.ready; it was "
        "if output.last",
        "offload/connector/ours.py:9",
        False,
    ),
    "hook called with something else": (
        "vllm/runner.py",
        ("begin(output, tokens=3)", "begin(output, tokens=3, late=True)"),
        "calls of Base.begin: vllm.runner:Runner.step calls it with (1 late tokens), which our "
        "method does not accept",
        "offload/connector/ours.py:9",
        True,
    ),
    "hook that nobody calls": (
        "vllm/runner.py",
        ("self.connector.end(output)", "pass"),
        "calls of Base.end: vLLM no longer calls it",
        "offload/connector/ours.py:14",
        True,
    ),
}


def compared(snapshot: Contract, source: PackageSource) -> list[Break]:
    own = Texts("offload", OURS)
    now = contract_of(source, own, TABLE)
    return breaks(snapshot, now.facts, our_parameters(Library(own)), dict(now.lines))


@pytest.fixture(scope="module")
def snapshot() -> Contract:
    return contract_of(Texts("vllm", VLLM), Texts("offload", OURS), TABLE)


def test_equal_versions_have_no_breaks(snapshot: Contract) -> None:
    assert compared(snapshot, Texts("vllm", VLLM)) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_kind_of_break_is_named_with_its_line(snapshot: Contract, name: str) -> None:
    path, change, text, line, is_fatal = PLANTED[name]
    found = compared(snapshot, Edited(Texts("vllm", VLLM), {path: (change,)}))
    named = [each for each in found if str(each) == text]
    assert named, f"not named; found {[str(each) for each in found]}"
    assert named[0].is_fatal is is_fatal
    has_gone = text.endswith("is gone")  # found by its name: see test_installed
    assert has_gone or line in named[0].lines


def test_a_definition_that_moves_is_not_a_break_if_its_name_is_still_imported(
    snapshot: Contract,
) -> None:
    moved = dict(VLLM)
    moved["vllm/config/deep.py"] = moved["vllm/config/whole.py"]
    moved["vllm/config/whole.py"] = "from vllm.config.deep import *\n"
    moved["vllm/config/__init__.py"] = "from vllm.config.deep import Config\n"
    assert compared(snapshot, Texts("vllm", moved)) == []


def test_a_module_that_has_become_empty_has_no_names(snapshot: Contract) -> None:
    emptied = VLLM | {"vllm/runner.py": ""}
    named = [str(each) for each in compared(snapshot, Texts("vllm", emptied))]
    assert "calls of Base.end: vLLM no longer calls it" in named


def test_a_version_is_compared_with_the_nearest_tested_one() -> None:
    """The kept contract of a refused version says nothing about other versions."""
    assert minor_of("0.31") in snapshot_versions()
    old = Texts("vllm", VLLM | {"vllm/_version.py": "__version__ = version = '0.31.2'\n"})
    checked = check(old)
    assert checked.version == "0.31.2"
    assert checked.against == TESTED[0]
    assert checked.breaks
    assert nearest_tested((0, 33)) == nearest_tested((0, 99)) == (0, 33)


def test_an_optional_parameter_of_a_function_is_not_a_break(snapshot: Contract) -> None:
    change = ("align: int = 8", "align: int = 8, strict: bool = False")
    assert (
        compared(snapshot, Edited(Texts("vllm", VLLM), {"vllm/config/whole.py": (change,)})) == []
    )


def test_a_wheel_and_a_folder_contain_their_texts(snapshot: Contract, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-7.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path, text in VLLM.items():
            file.writestr(path, text)
            (tmp_path / "unpacked" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "unpacked" / path).write_text(text)
        file.writestr("vllm-7.1.0.dist-info/METADATA", "Name: vllm\nVersion: 7.1.0+cpu\n")
    assert open_source(str(wheel)).version() == "7.1.0+cpu"
    assert compared(snapshot, open_source(str(wheel))) == []
    for folder in ("unpacked", "unpacked/vllm"):
        source = open_source(str(tmp_path / folder))
        assert source.version() == "7.1.0"
        assert compared(snapshot, source) == []


def test_an_invalid_wheel_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torn.whl").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(SourceError, match="not a wheel that can be read"):
        open_source(str(tmp_path / "torn.whl"))
    with pytest.raises(SourceError, match="there is no such file"):
        open_source(str(tmp_path / "none.whl"))
    with pytest.raises(SourceError, match="has no package vllm"):
        open_source(str(tmp_path))

"""The public surface: every exported name exists and is documented, imports are cheap, and code
that follows the guides passes ``mypy --strict``."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offload
from offload.cli.serve import VLLM
from policies.simulation.trace import TraceWriter
from policies.testing import synthetic_trace
from tests.imports import imports_of, python_files
from tests.patience import PATIENCE_S
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("offload", "policies", "tiers")
WITH_VLLM = {"huggingface_hub", "pydantic"}
"""Imported only where vLLM is, which requires them."""


REFERENCE = load_script("api_reference")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert sorted(set(module.__all__) - set(dir(module))) == []
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = module.Nonsense


@pytest.mark.parametrize("package", PACKAGES)
def test_a_lazy_name_is_what_the_type_checker_sees(package: str) -> None:
    """The type checker reads the imports, Python reads the table: both must name the same
    object."""
    module = importlib.import_module(package)
    for name in module.__all__:
        entry = REFERENCE.find(package, name)
        assert getattr(module, name) is getattr(importlib.import_module(entry.module), name)


@pytest.mark.parametrize("package", REFERENCE.MODULES)
def test_every_public_name_is_documented(package: str) -> None:
    entries = [REFERENCE.find(package, name) for name in REFERENCE.public_names(package)]
    assert [missing for entry in entries for missing in REFERENCE.undocumented(entry)] == []


@pytest.mark.parametrize("module", REFERENCE.KEPT_PATHS)
def test_documented_import_paths_stay_valid(module: str) -> None:
    found = importlib.import_module(module)
    names = REFERENCE.KEPT_PATHS[module]
    assert [name for name in names if not hasattr(found, name)] == []
    exported = {name for other in REFERENCE.MODULES for name in REFERENCE.public_names(other)}
    assert set(names) - exported <= {"AdaptivePolicy"}, "what users import is exported"


def test_the_reference_is_up_to_date() -> None:
    if os.environ.get("KVTIERS_REWRITE"):
        REFERENCE.PAGE.write_text(REFERENCE.page())
    assert REFERENCE.PAGE.read_text() == REFERENCE.page()


def test_the_examples_and_guides_import_only_public_names() -> None:
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for guide in ("write-a-policy", "write-a-tier"):
        page = (ROOT / f"docs/guides/{guide}.md").read_text()
        texts += re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    imported = [
        (node.module or "", alias.name)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").partition(".")[0] in PACKAGES
    ]
    public = {(m, name) for m in REFERENCE.MODULES for name in REFERENCE.public_names(m)}
    assert len(imported) > 20
    assert set(imported) - public == set()


def test_importing_the_packages_imports_neither_torch_nor_vllm() -> None:
    look = (
        "import offload, policies, tiers, sys; print(*{'torch', 'vllm', 'lmdb'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ["policies", "tiers"])
@pytest.mark.parametrize("kind", ["package", "module", "folder"])
def test_another_package_of_that_name_is_named(name: str, kind: str, tmp_path: Path) -> None:
    other = tmp_path / name
    if kind == "module":
        other = other.with_suffix(".py")
        other.write_text("")
    else:
        other.mkdir()
        (other / ("__init__.py" if kind == "package" else "data.txt")).write_text("")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import offload"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True)
    if kind == "folder":  # without __init__.py, a package later on the path wins
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    found = f"ImportError: kvtiers: Python imports the package {name} from {other}, "
    assert last.startswith(f"{found}not kvtiers' own from {ROOT / name}. Rename the other")


def test_the_served_process_takes_no_modules_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "tiers").mkdir()
    (tmp_path / "tiers" / "__init__.py").write_text("raise SystemExit('not ours')")
    command = [*VLLM[: VLLM.index("-m")], "-c", "import tiers; print(tiers.__file__)"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "tiers/__init__.py"), done.stderr


ALWAYS_ABSENT = ("torch", "vllm", "transformers", "pandas", "matplotlib")
DRAWS = ("rich",)
CONVERTS = ("pydantic",)
"""The library with which typer 0.29 converts the value of an argument."""


@pytest.mark.parametrize(
    ("words", "code", "absent"),
    [
        (["top", "127.0.0.1:1", "--once"], 1, DRAWS),  # nothing listens there
        (["simulate", "trace.jsonl", "--capacity", "8blocks", "--jobs", "1"], 0, ()),
        (["plan", "--token-bytes", "128KiB", "--cpu", "1GiB"], 0, ()),
        (["check", '{"cpu": {"capacity": "64MiB"}}'], 0, ()),
        (["--help"], 0, DRAWS + CONVERTS),
        (["--version"], 0, DRAWS + CONVERTS),
        (["top", "--help"], 0, DRAWS + CONVERTS),
        (["simulate", "--help"], 0, DRAWS + CONVERTS),
    ],
)
def test_commands_run_without_the_libraries_that_they_do_not_need(
    words: list[str], code: int, absent: tuple[str, ...], tmp_path: Path
) -> None:
    """Importing torch takes seconds, rich and pydantic a tenth of one each."""
    with TraceWriter(tmp_path / "trace.jsonl", "t", 16) as writer:
        for request in synthetic_trace(1, requests=20).requests:
            writer.write(request)
    program = (
        "import sys\n"
        f"absent = {ALWAYS_ABSENT + absent}\n"
        "sys.modules.update(dict.fromkeys(absent))\n"  # None: importing them fails
        f"sys.argv = ['kvtiers', *{words}]\n"
        "from offload.cli import main\n"
        "main()\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_the_packages_are_typed_and_their_version_has_one_source() -> None:
    config = pytest.importorskip("setuptools.config.pyprojecttoml")
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r'(?m)^version = "', text)
    read = config.read_configuration(ROOT / "pyproject.toml")
    assert read["project"]["version"] == offload.__version__
    assert read["tool"]["setuptools"]["package-data"][""] == ["py.typed"], "in every package"
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").exists()] == []


def test_imports_and_declared_dependencies_agree() -> None:
    """The environment of the tests has many packages, so a forgotten one would not be missed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()

    def modules(lines: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}

    required = modules(project["dependencies"])
    declared = required.union(*map(modules, extras))
    found = {
        name.partition(".")[0] for path in python_files(*PACKAGES) for name in imports_of(path)
    }
    assert found - sys.stdlib_module_names - set(PACKAGES) - declared == WITH_VLLM
    assert required - found == set()


@pytest.mark.thorough
def test_code_that_follows_the_guides_passes_mypy_strict(tmp_path: Path) -> None:
    """Checks the examples, and the policy, tier and tests printed in the guides."""
    for guide in ("write-a-policy", "write-a-tier"):
        text = (ROOT / f"docs/guides/{guide}.md").read_text()
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            named = re.match(r"# (\w+\.py)\n", block)
            (tmp_path / (named[1] if named else f"{guide.replace('-', '_')}.py")).write_text(block)
    example = (ROOT / "examples/custom_tier.py").read_text()
    (tmp_path / "my_tier.py").write_text(example.replace("SqliteTier", "MyTier"))
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nmypy_path = {ROOT}\nfollow_imports = silent\n"
        "[mypy-torch.*,vllm.*,lmdb.*,llvmlite.*,xxhash.*,zstandard.*,cuda.*,triton.*,"
        "numpy.*,pytest.*,hypothesis.*]\n"
        "follow_imports = skip\nignore_missing_imports = True\n"
    )
    written = sorted(tmp_path.glob("*.py"))
    assert {"my_policy.py", "test_my_policy.py", "test_my_tier.py"} <= {f.name for f in written}
    command = ["-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache"]
    done = subprocess.run(
        [sys.executable, *command, *written, *sorted((ROOT / "examples").glob("*.py"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr

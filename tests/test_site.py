"""The documentation as a web site: the right files are copied, and mkdocs finds every link and
anchor."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def links_of(page: Path) -> set[Path]:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text)
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def test_every_page_is_in_the_menu_and_every_link_stays_inside(tmp_path: Path) -> None:
    site = load()
    copied = site.stage(tmp_path)
    pages = {path for path in copied if path.suffix == ".md"}
    assert {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")} <= pages
    menu = re.findall(r"'([\w./-]+\.md)'", str(list(site.menu(tmp_path))))
    assert sorted(menu) == sorted({*map(str, pages), "docs/decisions/index.md"})
    lost = {link for page in tmp_path.rglob("*.md") for link in links_of(page) if not link.exists()}
    assert lost == set()


def package_index_answers(folder: Path) -> bool:
    """True if pip can download a small package from the index that it is configured to use."""
    python = folder / "venv/bin/python"  # which the site's set-up has made
    pip = [
        str(python if python.exists() else sys.executable),
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--retries",
        "1",
    ]
    command = [*pip, "--dest", str(folder / "wheels"), "iniconfig"]
    return subprocess.run(command, capture_output=True, timeout=PATIENCE_S).returncode == 0


@pytest.mark.thorough
def test_mkdocs_builds_the_site_and_reports_broken_links_and_anchors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = load()
    monkeypatch.setattr(site, "WORK", tmp_path)
    try:
        site.mkdocs()
    except subprocess.CalledProcessError:
        if not package_index_answers(tmp_path):
            pytest.skip("needs mkdocs, and no package index answers")
        raise
    monkeypatch.setattr("sys.argv", ["site.py", "--out", str(tmp_path / "html")])
    assert site.main() == 0
    assert len(list((tmp_path / "html").rglob("*.html"))) > 60
    stage = site.stage

    def with_faults(pages: Path) -> None:
        stage(pages)
        with (pages / "README.md").open("a") as page:
            page.write("\n[one](docs/guides/no.md) [two](docs/guides/serve.md#no-such-part)\n")

    monkeypatch.setattr(site, "stage", with_faults)
    assert site.main() != 0
    complaints = capfd.readouterr().err
    for link in ("docs/guides/no.md", "docs/guides/serve.md#no-such-part"):
        assert link in complaints

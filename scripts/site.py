"""Builds the documentation as a web site, from the pages that are in the repository.

    python scripts/site.py [--out FOLDER]     (default: .cache/site/html)

Copies the pages and the files to which they link into one folder, writes mkdocs's configuration
beside it, and runs ``mkdocs build --strict``, which fails for dead links and anchors. The first run
installs mkdocs into a separate environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".cache" / "site"
MKDOCS = "mkdocs==1.6.1"
COPIED = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Dockerfile"),
    *("docs/**/*.md", "docs/**/*.svg", "docs/dashboards/*", "docs/deployments/*"),
    *("docs/images/*.png", "bench/results/*.md"),
    *("bench/results/*.png", "examples/*.py", "scripts/gpu_box/README.md"),
)
FIRST = (
    *("serve", "model-families", "size-the-tiers", "look-ahead"),
    *("misses", "dashboard", "when-a-disk-dies", "operate", "upgrade", "share"),
)
"""Guides at the head of the menu, in the order in which a user needs them: start, observe, repair,
change. The others follow by name."""
FOLDER_LINK = re.compile(r"\]\(((?:\.\./)*(?:docs/)?decisions)/?\)")


def stage(pages: Path) -> list[Path]:
    """Copy everything into an empty folder, with the same layout. Returns the relative paths."""
    copied = sorted({path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()})
    for path in copied:
        target = pages / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(FOLDER_LINK.sub(r"](\1/index.md)", text), encoding="utf-8")
    decisions = sorted((pages / "docs/decisions").glob("*.md"))
    lines = [f"* [{title_of(page)}]({page.name})\n" for page in decisions]
    (pages / "docs/decisions/index.md").write_text("# Decisions\n\n" + "".join(lines))
    return [path.relative_to(ROOT) for path in copied]


def title_of(page: Path) -> str:
    """The first heading of a page."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else page.stem


def menu(pages: Path) -> Iterator[dict[str, Any]]:
    """The entries of the menu, in order."""

    def named(*paths: Path) -> list[dict[str, str]]:
        return [{title_of(path): path.relative_to(pages).as_posix()} for path in paths]

    docs = pages / "docs"
    guides = {path.stem: path for path in sorted((docs / "guides").glob("*.md"))}
    yield {"kvtiers": "README.md"}
    yield {"Guides": named(*(guides.pop(name) for name in FIRST), *guides.values())}
    yield {"Reference": named(*sorted((docs / "reference").glob("*.md")), docs / "versions.md")}
    yield {"Measurements": named(*sorted((pages / "bench/results").glob("*.md")))}
    inside = [docs / name for name in ("roadmap.md", "architecture.md", "testing.md")]
    inside += [docs / "decisions/index.md"]
    yield {"Inside": named(*inside, *sorted((docs / "decisions").glob("0*.md")))}
    project = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "scripts/gpu_box/README.md")
    yield {"Project": named(*(pages / name for name in project))}


def configuration(pages: Path, out: Path) -> dict[str, Any]:
    """mkdocs's configuration, which is written as JSON, a subset of YAML."""
    found = dict.fromkeys(("not_found", "absolute_links", "unrecognized_links", "anchors"), "warn")
    return {
        "site_name": "kvtiers",
        "docs_dir": str(pages),
        "site_dir": str(out),
        "theme": "readthedocs",
        "use_directory_urls": False,
        "markdown_extensions": ["tables", "fenced_code", "toc"],
        "validation": {"nav": {"omitted_files": "warn"}, "links": found},
        "nav": list(menu(pages)),
    }


def mkdocs() -> list[str]:
    """Return the command that runs mkdocs. Installs mkdocs if necessary."""
    if importlib.util.find_spec("mkdocs"):
        return [sys.executable, "-m", "mkdocs"]
    python = WORK / "venv" / "bin" / "python"
    has_it = python.exists() and not subprocess.run([python, "-c", "import mkdocs"]).returncode
    if not has_it:
        venv.create(WORK / "venv", with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", MKDOCS], check=True)
    return [str(python), "-m", "mkdocs"]


def main() -> int:
    """Build the site. Returns mkdocs's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=WORK / "html")
    out = parser.parse_args().out.resolve()
    pages = WORK / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    stage(pages)
    config = WORK / "mkdocs.yml"
    config.write_text(json.dumps(configuration(pages, out), indent=2), encoding="utf-8")
    command = [*mkdocs(), "build", "--strict", "--clean", "--config-file", str(config)]
    # Do not pass --quiet: with it, mkdocs ignores warnings in spite of --strict.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    else:
        print(f"{out / 'index.html'}: {sum(1 for _ in out.rglob('*.html'))} pages")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())

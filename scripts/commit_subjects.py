"""Checks the subjects of the last commits: they have at most 72 characters.

Does nothing without git, and in a folder that is not the root of a repository. In a shallow clone
it checks the commits that are there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMITS = 20
CHARACTERS_MAX = 72


def git(*arguments: str) -> str:
    """Return the output of git; nothing if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def long_subjects() -> list[str]:
    """Return the commits whose subjects are too long. Merges do not count, because a server writes
    their subjects."""
    root = git("rev-parse", "--show-toplevel").rstrip("\n")
    if not root or not ROOT.samefile(root):
        return []
    log = git("log", f"-{COMMITS}", "--no-merges", "--format=%h %s")
    commits = (line.partition(" ") for line in log.splitlines())
    return [f"{name} {text}" for name, _, text in commits if len(text) > CHARACTERS_MAX]


def main() -> int:
    found = long_subjects()
    for commit in found:
        print(f"the subject has more than {CHARACTERS_MAX} characters: {commit}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

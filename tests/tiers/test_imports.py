"""Importing a part of ``tiers`` loads only the libraries that it needs."""

from __future__ import annotations

import subprocess
import sys

import tiers
import tiers.authoring


def loaded_by(statement: str) -> set[str]:
    """The modules that a new interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_copies_on_the_cpu_do_not_import_the_cuda_driver() -> None:
    loaded = loaded_by("import tiers.copy.host_engine, tiers.slab.slab")
    assert "tiers.copy.base" in loaded
    assert "tiers.cuda_driver" not in loaded


def test_the_package_imports_no_medium() -> None:
    loaded = loaded_by("import tiers, tiers.base, tiers.authoring")
    assert not {"lmdb", "mooncake", "torch"} & loaded


def test_the_shared_lmdb_tier_does_not_import_the_exclusive_commit_thread() -> None:
    loaded = loaded_by("import tiers.lmdb.shared.tier")
    assert "tiers.lmdb.io_jobs" in loaded
    assert "tiers.lmdb.commit_thread" not in loaded


def test_every_exported_name_exists() -> None:
    for module in (tiers, tiers.authoring):
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []

"""Imports the scripts of ``scripts/`` as modules, so that tests can use their functions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.imports import ROOT


def load_script(name: str) -> ModuleType:
    """Import ``scripts/NAME.py``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

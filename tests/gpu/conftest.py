"""Every test here needs a CUDA device; without one it is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest


def missing() -> str:
    """The reason why GPU tests cannot run here; empty if they can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = ""
    for item in items:
        if here in item.path.parents:
            reason = reason or missing()
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

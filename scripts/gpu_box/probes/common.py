"""Helpers for all probes: write the results, and provide a driver with a current context."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiers.cuda_driver import Driver, load_driver


def result(numbers: Mapping[str, Any]) -> None:
    """Print the numbers and store them for the report. May be called again with more."""
    text = json.dumps(numbers, indent=1)
    print(text, flush=True)
    if path := os.environ.get("PROBE_RESULT"):
        Path(path).write_text(text + "\n")


@contextlib.contextmanager
def device() -> Iterator[Driver]:
    """Load the driver, and make device 0's context current."""
    driver = load_driver()
    handle = driver.device(0)
    context = driver.retain_context(handle)
    try:
        with driver.within(context):
            yield driver
    finally:
        driver.release_context(handle)

"""Reads an object of JSON that a user gives as text, as a file, or on standard input."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from offload.cli.common import Problems
from offload.cli.numbers import size_text
from offload.cli.path_hints import CONFIG_BYTES_MAX

FILE_OR_JSON = "FILE|JSON"
NAME_A_FILE = "Name a file with a configuration"


class RepeatedNameError(ValueError):
    """An object of JSON has two values of this name."""


def read_object(
    problems: Problems, given: str, example: str, option: str = ""
) -> dict[str, Any] | None:
    """The object in ``given``, or ``None`` and a problem that shows ``example``.

    Problems are named after ``option``, or after the file if it is an argument without a name.
    """
    if not given.strip():
        fix = f"Name a file, or write {example}."
        problems.add(option or FILE_OR_JSON, "is empty", fix)
        return None
    is_text = given.lstrip().startswith(("{", "["))
    shown = option or "the JSON" if is_text else f"{option} {given}".strip()
    text = given if is_text else _read(problems, given, shown)
    if text is None:
        return None
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except RepeatedNameError as error:
        problems.add(shown, f'has "{error}" twice in one object', "Remove one of them.")
        return None
    except (ValueError, RecursionError) as error:
        problems.add(shown, f"is not JSON: {error}", "Write one object in JSON.")
        return None
    if not isinstance(found, dict):
        problems.add(shown, "is not an object", f"Write {example}.")
        return None
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. vLLM would silently use the last of several values."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RepeatedNameError(name)
        found[name] = value
    return found


def _is_pipe(where: str) -> bool:
    """Return True for a pipe, as a shell makes of ``<(command)``. It can be opened only once.
    A named pipe may have no writer, and is refused like a device."""
    try:
        return where.startswith(("/dev/fd/", "/proc/")) and stat.S_ISFIFO(os.stat(where).st_mode)
    except (OSError, ValueError):
        return False


def _read(problems: Problems, where: str, shown: str) -> str | None:
    try:
        if where == "-":
            if sys.stdin is None:
                raise ValueError("standard input is closed")
            found = sys.stdin.buffer.read(CONFIG_BYTES_MAX + 1)
        else:
            count = len(problems)
            if not _is_pipe(where):
                problems.file(Path(where), f"{NAME_A_FILE}, or give the JSON itself.", shown)
            if len(problems) > count:
                return None
            with Path(where).open("rb") as file:
                found = file.read(CONFIG_BYTES_MAX + 1)
        if len(found) > CONFIG_BYTES_MAX:
            what = f"is larger than {size_text(CONFIG_BYTES_MAX)}"
            problems.add(shown, what, f"{NAME_A_FILE}.")
            return None
        return found.decode("utf-8")
    except (OSError, ValueError) as error:
        problems.add(shown, f"cannot be read: {error}", "Name a file of JSON.")
        return None

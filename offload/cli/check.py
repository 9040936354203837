"""``kvtiers check``: checks a configuration against this machine, without vLLM."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.common import AsJson, Problems, make_app, print_json
from offload.cli.numbers import size_text

if TYPE_CHECKING:
    from offload.config.machine_checks import LoadedConfig

app = make_app()

CHECKED_BYTES_MAX = 1 << 20
AROUND = ("kv_transfer_config", "kv-transfer-config")
"""Names under which a file may hold the value of --kv-transfer-config."""
Where = Annotated[
    str,
    typer.Argument(
        metavar="FILE|JSON",
        help="A file, - for standard input, or the JSON itself: the value of --kv-transfer-config, "
        "or of kv_connector_extra_config in it.",
    ),
]


class RepeatedNameError(ValueError):
    """An object of JSON has two values of this name."""


@app.command()
def check(where: Where, as_json: AsJson = False) -> None:
    """Check a configuration against this machine: options, memory, folders, disks, other servers.

    A server makes the same checks when it starts. Nothing is loaded or written. The memory that
    vLLM itself takes is not counted. Exits with 1 if the configuration is wrong.
    """
    from offload.config.kv_transfer_config import check_transfer
    from offload.errors import ConfigError

    problems = Problems()
    transfer = _transfer(problems, where)
    problems.refuse("check")
    try:
        loaded = check_transfer(transfer)
    except ConfigError as error:
        if as_json:
            wrong = [{"where": p.where, "what": p.what, "fix": p.fix} for p in error.problems]
            print_json({"ok": False, "problems": wrong})
        else:
            print(error, file=sys.stderr)
        raise SystemExit(1) from None
    _report(loaded, as_json)


def _transfer(problems: Problems, where: str) -> dict[str, Any]:
    """The transfer configuration in a file or a text, or an empty one with a problem."""
    from offload.config.kv_transfer_config import EXTRA, NAME, ours, transfer_config

    if not where.strip():
        problems.add(
            "FILE|JSON", "is empty", 'Name a file, or write {"cpu": {...}, "tiers": [...]}.'
        )
        return {}
    is_text = where.lstrip().startswith(("{", "["))
    shown = "the JSON" if is_text else where
    text = where if is_text else _read(problems, where)
    if text is None:
        return {}
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except RepeatedNameError as error:
        problems.add(shown, f'has "{error}" twice in one object', "Remove one of them.")
        return {}
    except (ValueError, RecursionError) as error:
        problems.add(shown, f"is not JSON: {error}", "Write one object in JSON.")
        return {}
    for name in AROUND:
        if isinstance(found, dict) and name in found:
            found = found[name]
    if not isinstance(found, dict):
        problems.add(shown, "is not an object", 'Write {"cpu": {...}, "tiers": [...]}.')
        return {}
    if "kv_connector" not in found:
        if near := difflib.get_close_matches("kv_connector", found, 1, 0.8):
            problems.add(near[0], "is unknown", 'Write "kv_connector".')
        return transfer_config(found.get(EXTRA, found))
    if not any(ours(found)):
        what = f'names another connector (got "{found["kv_connector"]}")'
        problems.add(shown, what, f'Use "kv_connector": "{NAME}".')
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. vLLM would silently use the last of several values."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RepeatedNameError(name)
        found[name] = value
    return found


def _read(problems: Problems, where: str) -> str | None:
    try:
        if where == "-":
            found = sys.stdin.buffer.read(CHECKED_BYTES_MAX + 1)
        else:
            problems.file(Path(where), "Name a file with a configuration, or give the JSON itself.")
            if problems:
                return None
            with Path(where).open("rb") as file:
                found = file.read(CHECKED_BYTES_MAX + 1)
        if len(found) > CHECKED_BYTES_MAX:
            what = f"is larger than {size_text(CHECKED_BYTES_MAX)}"
            problems.add(where, what, "Name a file with a configuration.")
            return None
        return found.decode("utf-8")
    except (OSError, ValueError) as error:
        problems.add(where, f"cannot be read: {error}", "Name a file of JSON.")
        return None


def _report(loaded: list[LoadedConfig], as_json: bool) -> None:
    notes = [note for one in loaded for note in one.notes]
    warnings = [str(warning) for one in loaded for warning in one.warnings]
    tiers = [(name, size) for one in loaded for name, size in _tiers(one)]
    if as_json:
        sizes = [{"tier": name, "capacity_bytes": size} for name, size in tiers]
        print_json({"ok": True, "tiers": sizes, "notes": notes, "warnings": warnings})
        return
    for name, size in tiers:
        print(f"{name}: {size_text(size)}")
    for kind, lines in (("note", notes), ("warning", warnings)):
        for line in lines:
            print(f"{kind}: {line}")
    count = f", with {len(warnings)} warning{'s' * (len(warnings) > 1)}" if warnings else ""
    print(f"the configuration fits this machine{count}")


def _tiers(loaded: LoadedConfig) -> list[tuple[str, int]]:
    config = loaded.config
    lower = [(f"{tier.type} {tier.path}".strip(), tier.capacity) for tier in config.tiers]
    return [("cpu", config.cpu.capacity), *lower]

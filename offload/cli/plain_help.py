"""Prints the help and errors of commands as plain text, because importing rich takes long.

Errors also show the wrong value of an option, which typer 0.29 omits from some of them.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from offload.cli.vllm_flags import flag_values

HELP_NAMES = {"help_option_names": ["--help", "-h"]}
"""Settings of a group; its commands inherit them."""


class PlainCommand(TyperCommand):
    """One command. Its errors about an option show the option's value, and lists of commands show
    the whole first sentence of its help."""

    def get_short_help_str(self, limit: int = sys.maxsize) -> str:
        return super().get_short_help_str(sys.maxsize)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            names = getattr(error.param, "opts", [])
            values = [value for name in names for value in flag_values(given, name)]
            if len(values) == 1 and values[0] not in error.message:
                error.message = f"{error.message.rstrip('.')} (got {values[0]})"
            raise


class PlainGroup(TyperGroup):
    """A group of commands. A switch of the group that is not given is off.

    Without this, typer's own switches, which set up completion, would be ``None``, and typer 0.29
    would import pydantic to convert ``None``.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return parameters


def plain(app: typer.Typer) -> typer.Typer:
    """Make an app and its registered commands plain, and return the app."""
    app.rich_markup_mode = None
    for command in app.registered_commands:
        command.cls = PlainCommand
    return app

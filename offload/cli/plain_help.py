"""Commands whose help looks the same with every version of typer.

typer 0.29 keeps the line breaks of a docstring within a paragraph, shows a switch as if it took a
value, and leaves the wrong value out of some errors.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from offload.cli.vllm_flags import flag_values

HELP_NAMES = {"help_option_names": ["--help", "-h"]}
"""Settings of a group; its commands inherit them."""


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


class PlainCommand(TyperCommand):
    """One command. Its errors about an option show the option's value."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.help = self.help and paragraphs(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

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
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    """Remove the types of switches from the help, because switches take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def plain(app: typer.Typer) -> typer.Typer:
    """Make the registered commands of an app plain, and return the app."""
    for command in app.registered_commands:
        command.cls = PlainCommand
    return app

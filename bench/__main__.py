"""``python -m bench <question>``."""

from __future__ import annotations

import importlib
import importlib.util

import typer

from offload.cli.plain_help import HELP_NAMES, PlainGroup, plain

QUESTIONS = (
    *("copy", "tiers", "shared", "churn", "restart", "hooks", "policies", "gates"),
    *("serve", "backlog", "replay"),
)


def build() -> typer.Typer:
    """The command line, with one command per benchmark module."""
    app = typer.Typer(
        cls=PlainGroup,
        help="Benchmarks of this project.",
        no_args_is_help=True,
        context_settings=HELP_NAMES,
    )

    @app.callback()
    def _root() -> None:
        """Without a callback, typer would turn a single command into the whole program."""

    for name in QUESTIONS:
        if importlib.util.find_spec(f"bench.{name}") is not None:
            importlib.import_module(f"bench.{name}").register(app)
    return plain(app)


if __name__ == "__main__":
    build()()

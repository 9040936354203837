"""The command line ``kvtiers`` (also ``python -m offload.cli``)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Annotated

import typer

from offload.doctor import Report, to_json, to_text
from policies.simulate_cli import EPILOG, simulate

app = typer.Typer(
    name="kvtiers",
    help="KV-cache offloading for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command(epilog=EPILOG)(simulate)

PASS_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.callback()
def main_options() -> None:
    """Without a callback, typer would make the only command the program itself."""


@app.command(context_settings=PASS_FLAGS_ON)
def doctor(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or name of the model, as for vllm serve.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether and how a model's KV caches can be offloaded, without loading its weights.

    All other flags are those of vllm serve, --kv-transfer-config among them. Ends with 0 if the
    model can be offloaded, with 1 if not.
    """
    report = _examine(model, context.args)
    print(json.dumps(to_json(report)) if as_json else to_text(report))
    raise typer.Exit(0 if report.ok else 1)


def _examine(model: str, flags: list[str]) -> Report:
    """vLLM's own output goes to stderr, so that stdout holds the report alone."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with contextlib.redirect_stdout(sys.stderr):
        from offload.connector.examine import examine_model

        return examine_model(model, flags)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

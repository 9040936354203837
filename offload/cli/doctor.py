"""``kvtiers doctor``: says whether and how a model can be offloaded."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from offload.admin.doctor import Report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PASS_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


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
    from offload.admin.doctor import to_json, to_text

    report = ask_vllm(model, context.args)
    print(json.dumps(to_json(report)) if as_json else to_text(report))
    raise typer.Exit(0 if report.ok else 1)


def ask_vllm(model: str, flags: list[str]) -> Report:
    """The doctor's report. vLLM's output goes to stderr, so that stdout holds only results."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    with contextlib.redirect_stdout(sys.stderr):
        from offload.connector.model.doctor import examine_model

        return examine_model(model, flags)

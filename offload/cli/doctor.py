"""``kvtiers doctor``: says whether and how a model can be offloaded."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli import INTERRUPTED
from offload.cli.common import make_app, print_json
from offload.cli.model_names import wrong_name, wrong_path
from offload.cli.vllm_flags import SERVE_OPTIONS, TRANSFER, has_flag, transfer_problems

if TYPE_CHECKING:
    from rich.console import Console

    from offload.admin.doctor import Report

app = make_app()

PASS_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASS_FLAGS_ON)
def doctor(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or name of the model, as for vllm serve.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report whether and how a model's KV caches can be offloaded, without loading its weights.

    All other flags are those of vllm serve, including --kv-transfer-config. Exits with 0 if the
    model can be offloaded, 1 if not, 2 if the flags or the configuration are wrong, 3 if there is
    no such model, and 4 if vLLM itself refuses it.
    """
    from offload.admin.doctor import EXIT_CODES, to_json, to_text

    report = refused_early(model, context.args)
    if report is None:
        report = ask_vllm(model, context.args)
    if as_json:
        print_json(to_json(report))
    else:
        print(to_text(report))
    raise typer.Exit(EXIT_CODES[report.verdict])


def refused_early(model: str, flags: list[str]) -> Report | None:
    """The report for a name that is not a model or for a wrong configuration, if this can be
    determined without importing vLLM, which takes a quarter of a minute."""
    from offload.admin.doctor import ModelVerdict, refusal

    if model.startswith("-"):
        reason = "the model comes first: kvtiers doctor MODEL [vllm flags]"
        return refusal(model, ModelVerdict.WRONG_FLAGS, reason)
    if own := [name for name in SERVE_OPTIONS if has_flag(flags, name)]:
        reason = f"{own[0]} is an option of kvtiers serve. Give the tiers with {TRANSFER}"
        return refusal(model, ModelVerdict.WRONG_FLAGS, reason)
    if wrong := wrong_path(model, flags) or wrong_name(model, flags, os.environ):
        what, fix = wrong
        fixes = [fix[0].lower() + fix[1:]]
        return refusal(model, ModelVerdict.UNKNOWN_MODEL, f"{model} {what}", fixes=fixes)
    if problems := transfer_problems(flags):
        return refusal(model, ModelVerdict.WRONG_FLAGS, *map(str, problems))
    return None


def ask_vllm(model: str, flags: list[str]) -> Report:
    """Make the doctor's report. vLLM's output goes to stderr, so that stdout contains only
    results."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    # also for warnings from before vLLM has set up its log, such as the one about Triton
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    waiting = console.status(f"importing vLLM to ask it about {escape(model)}; this takes a while")
    with _ended_by_ctrl_c(console), waiting if console.is_terminal else contextlib.nullcontext():
        return _examine(model, flags)


@contextlib.contextmanager
def _ended_by_ctrl_c(console: Console) -> Iterator[None]:
    """Let Ctrl-C end the process at once. A ``KeyboardInterrupt`` inside an import of vLLM's may be
    caught there, or abort the process in C++ code."""

    def end(_number: int, _frame: object) -> None:
        console.show_cursor()
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as for background jobs of a script
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _examine(model: str, flags: list[str]) -> Report:
    with contextlib.redirect_stdout(sys.stderr):
        from offload.connector.doctor import examine_model

        return examine_model(model, flags)

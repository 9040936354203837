"""``kvtiers serve``: ``vllm serve`` with this connector, from two flags instead of JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from offload.cli import NO_VLLM
from offload.cli.common import Problems, check_spelling, make_app
from offload.cli.doctor import PASS_FLAGS_ON
from offload.cli.model_names import wrong_name, wrong_path
from offload.cli.vllm_flags import TRANSFER, has_flag, transfer_problems
from offload.errors import ConfigError, Problem

app = make_app()

VLLM = [sys.executable, "-P", "-m", "offload.connector.vllm_cli", "serve"]
"""Start vLLM as its script ``vllm`` does: without the current folder on the module search path."""
HASH, FILE = "--prefix-caching-hash-algo", "--config"
STABLE_HASH = "sha256_cbor"
CPU_VARIABLE, DISK_VARIABLE = "KVTIERS_CPU", "KVTIERS_DISK"

Cpu = Annotated[
    str,
    typer.Option(help=f"Host memory for KV blocks, e.g. 32GiB. (default: {CPU_VARIABLE}, or a "
                 "quarter of the memory)"),
]  # fmt: skip
Disk = Annotated[
    list[str] | None,
    typer.Option(help="Folder and space for KV blocks, e.g. /data/kv:200GiB. Repeatable, fastest "
                 f"first. (default: {DISK_VARIABLE}, several with commas, or none)"),
]  # fmt: skip


@dataclass(slots=True)
class WantedTiers:
    """The requested tiers, and the flag or variable behind each field, to name it in a problem."""

    extra: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


@app.command(context_settings=PASS_FLAGS_ON)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model, as for vllm serve.")],
    kv_cpu: Cpu = "",
    kv_disk: Disk = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the command, and end.")
    ] = False,
) -> None:
    """Start vllm serve with KV blocks kept in host memory and on disk, and print the added flags.

    All other flags are those of vllm serve. The model's name and the tiers are checked first;
    --dry-run does not ask the hub about the name. With --kv-transfer-config or --config, only the
    flags for --kv-cpu and --kv-disk are added.
    """
    problems = Problems()
    if model.startswith("-"):
        problems.add(model, "comes before the model", "Write kvtiers serve MODEL [flags].")
    elif wrong := _wrong_model(model, context.args, is_started=not dry_run):
        problems.add(model, wrong[0], f"{wrong[1]}.")
    check_spelling(problems, "serve", ["--kv-cpu", "--kv-disk", "--dry-run"], context.args)
    added = flags_to_add(context.args, kv_cpu, kv_disk or [], os.environ, problems)
    if not dry_run and importlib.util.find_spec("vllm") is None:
        problems.add(*NO_VLLM)
    problems.refuse("serve")
    command = [*VLLM, model, *added, *context.args]
    if added:
        _say(f"added {shlex.join(added)}")
    if dry_run:
        print(shlex.join(["vllm", *command[len(VLLM) - 1 :]]))
        return
    os.execv(command[0], command)


def _wrong_model(model: str, flags: list[str], *, is_started: bool) -> tuple[str, str] | None:
    """Say why vLLM would not find the model, and what to do. vLLM itself takes half a minute to
    report this."""
    found = wrong_path(model, flags)
    return found or (wrong_name(model, flags, os.environ) if is_started else None)


def flags_to_add(
    flags: list[str],
    cpu: str,
    disks: list[str],
    environment: Mapping[str, str],
    problems: Problems,
) -> list[str]:
    """The flags of ``vllm serve`` that the user has not given. They come first on the command line,
    so that the user's flags take precedence."""
    from offload.config.kv_transfer_config import check_transfer, transfer_config
    from offload.namespaces.wait_for_owners import Patience

    has_own = has_flag(flags, TRANSFER) or has_flag(flags, FILE)
    if has_flag(flags, TRANSFER) and (cpu or disks):
        fix = "Give one of them, or put the tiers into the JSON."
        problems.add(TRANSFER, "is given together with --kv-cpu or --kv-disk", fix)
    if has_own and not (cpu or disks):
        _say_unused(environment)
        problems += transfer_problems(flags)
        return []
    wanted = tiers_wanted(cpu, disks, environment, problems)
    transfer = transfer_config(wanted.extra)
    try:  # do not wait for the folders of a server that will not start
        loaded = check_transfer(transfer, None if problems else Patience(_say))
    except ConfigError as error:
        problems += [_named(problem, wanted.sources) for problem in error.problems]
    if problems:
        return []
    _say_memory(flags, loaded[0].config.cpu.capacity, environment)
    hashing = [] if has_flag(flags, HASH) or has_flag(flags, FILE) else [HASH, STABLE_HASH]
    return [TRANSFER, json.dumps(transfer), *hashing]


def _say_unused(environment: Mapping[str, str]) -> None:
    for name in (CPU_VARIABLE, DISK_VARIABLE):
        if environment.get(name):
            _say(f"{name} is not used together with {TRANSFER} or {FILE}")


def _say_memory(flags: list[str], capacity: int, environment: Mapping[str, str]) -> None:
    """Warn early: vLLM refuses to start after half a minute if its part does not fit."""
    from offload.cli.cpu_platform import is_cpu_build, memory_warning
    from offload.config.memory_limits import memory_limit

    if is_cpu_build() and (line := memory_warning(flags, capacity, environment, memory_limit())):
        _say(line)


def _say(line: str) -> None:
    print(f"kvtiers serve: {line}", file=sys.stderr, flush=True)


def tiers_wanted(
    cpu: str, disks: list[str], environment: Mapping[str, str], problems: Problems
) -> WantedTiers:
    """Read the flags, or the environment if there are none."""
    wanted = WantedTiers()
    name = "--kv-cpu" if cpu else CPU_VARIABLE
    if cpu := cpu or environment.get(CPU_VARIABLE, ""):
        wanted.extra["cpu"] = {"capacity": cpu}
        wanted.sources["$.cpu.capacity"] = name
    name = "--kv-disk" if disks else DISK_VARIABLE
    texts = disks or environment.get(DISK_VARIABLE, "").split(",")
    tiers: list[dict[str, str]] = []
    for text in filter(None, map(str.strip, texts)):
        path, colon, capacity = text.rpartition(":")
        if not (path and colon and capacity):
            problems.add(name, f'must be PATH:SIZE (got "{text}")', "Write /data/kv:200GiB.")
            continue
        tier = {"type": "lmdb", "path": path, "capacity": capacity}
        wanted.sources |= {f"$.tiers[{len(tiers)}].{key}": f"{name} {text}" for key in tier}
        tiers.append(tier)
    if tiers:
        wanted.extra["tiers"] = tiers
    return wanted


def _named(problem: Problem, sources: Mapping[str, str]) -> Problem:
    """Name a problem by the flag or variable that causes it."""
    return Problem(sources.get(problem.where, problem.where), problem.what, problem.fix)

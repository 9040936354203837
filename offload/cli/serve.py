"""``kvtiers serve``: ``vllm serve`` with this connector, from two flags instead of JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from offload.cli import NO_VLLM
from offload.cli.common import Problems, check_spelling, make_app
from offload.cli.doctor import PASS_FLAGS_ON
from offload.cli.json_input import FILE_OR_JSON, read_object
from offload.cli.model_names import wrong_name, wrong_path
from offload.cli.vllm_flags import (
    EXTRA_OPTION,
    SERVE_OPTIONS,
    TRANSFER,
    has_flag,
    transfer_problems,
)
from offload.errors import WRONG_USAGE, ConfigError

app = make_app()

VLLM = [sys.executable, "-P", "-m", "offload.connector.vllm_cli", "serve"]
"""Start vLLM as its script ``vllm`` does: without the current folder on the module search path."""
HASH, FILE = "--prefix-caching-hash-algo", "--config"
STABLE_HASH = "sha256_cbor"
CPU_VARIABLE, DISK_VARIABLE = "KVTIERS_CPU", "KVTIERS_DISK"
EXAMPLE = '{"record_requests": "/var/log/kvtiers.jsonl"}'

Cpu = Annotated[
    str,
    typer.Option(help=f"Host memory for KV blocks, e.g. 32GiB. (default: {CPU_VARIABLE}, or a "
                 "quarter of the memory)"),
]  # fmt: skip
Disk = Annotated[
    list[str] | None,
    typer.Option(help="Folder and size of a disk tier, e.g. /data/kv:200GiB. Repeatable, fastest "
                 f"first. (default: {DISK_VARIABLE}, several with commas, or none)"),
]  # fmt: skip

Extra = Annotated[
    str,
    typer.Option(metavar=FILE_OR_JSON, help="Further options of kv_connector_extra_config, as "
                 "a JSON object."),
]  # fmt: skip


@dataclass(slots=True)
class WantedTiers:
    """The requested tiers, and the flag or variable behind each field, to name it in a problem."""

    extra: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    has_options: bool = False

    def name(self, path: str) -> str:
        """The flag or variable that sets this path of the configuration, if one does."""
        is_option = self.has_options and path.startswith("$")
        return self.sources.get(path, f"{EXTRA_OPTION} {path}" if is_option else path)


@dataclass(frozen=True, slots=True)
class Given:
    """The values of the command's own flags."""

    cpu: str = ""
    disks: list[str] = field(default_factory=list)
    extra: str = ""

    @property
    def names(self) -> list[str]:
        """The flags that were given."""
        values = {"--kv-cpu": self.cpu, "--kv-disk": self.disks, EXTRA_OPTION: self.extra}
        return [name for name, value in values.items() if value]


@app.command(context_settings=PASS_FLAGS_ON)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model, as for vllm serve.")],
    kv_cpu: Cpu = "",
    kv_disk: Disk = None,
    kv_extra: Extra = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the command, and end.")
    ] = False,
) -> None:
    """Start vllm serve with KV blocks kept in host memory and on disk, and print the added flags.

    All other flags are those of vllm serve. The model's name and the tiers are checked first;
    --dry-run does not ask the hub about the name. With --kv-transfer-config or --config, only the
    flags for --kv-cpu, --kv-disk and --kv-extra are added. Exits with 2 if the flags or the
    configuration are wrong, and with 3 if there is no such model.
    """
    problems = Problems()
    code = WRONG_USAGE
    if model.startswith("-"):
        problems.add(model, "comes before the model", "Write kvtiers serve MODEL [flags].")
    elif wrong := wrong_path(model, context.args) or (
        None if dry_run else wrong_name(model, context.args, os.environ)
    ):  # vLLM itself takes half a minute to report this
        problems.add(model, wrong[0], f"{wrong[1]}.")
        code = _unknown_model()
    check_spelling(problems, "serve", SERVE_OPTIONS, context.args)
    given = Given(kv_cpu, kv_disk or [], kv_extra)
    added = flags_to_add(context.args, given, os.environ, problems)
    if not dry_run and importlib.util.find_spec("vllm") is None:
        problems.add(*NO_VLLM)
    problems.refuse("serve", code if len(problems) == 1 else WRONG_USAGE)
    command = [*VLLM, model, *added, *context.args]
    if added:
        _print_line(f"added {shlex.join(added)}")
    if dry_run:
        print(shlex.join(["vllm", *command[len(VLLM) - 1 :]]))
        return
    os.execv(command[0], command)


def _unknown_model() -> int:
    """The exit code for a model that does not exist."""
    from offload.admin.doctor import EXIT_CODES, ModelVerdict

    return EXIT_CODES[ModelVerdict.UNKNOWN_MODEL]


def flags_to_add(
    flags: list[str],
    given: Given,
    environment: Mapping[str, str],
    problems: Problems,
) -> list[str]:
    """The flags of ``vllm serve`` that the user has not given. They come first on the command line,
    so that the user's flags take precedence."""
    from offload.config.kv_transfer_config import check_transfer, transfer_config
    from offload.namespaces.wait_for_owners import Patience

    has_own = has_flag(flags, TRANSFER) or has_flag(flags, FILE)
    if has_flag(flags, TRANSFER) and given.names:
        fix = "Give one of them, or put the tiers into the JSON."
        problems.add(TRANSFER, f"is given together with {' and '.join(given.names)}", fix)
    if has_own and not given.names:
        _warn_of_unused_variables(environment)
        problems += transfer_problems(flags)
        return []
    wanted = tiers_wanted(given.cpu, given.disks, environment, problems)
    if given.extra:
        add_options(wanted, read_object(problems, given.extra, EXAMPLE, EXTRA_OPTION), problems)
    transfer = transfer_config(wanted.extra)
    try:  # wait for folders in use only if the server can start
        loaded = check_transfer(transfer, None if problems else Patience(_print_line))
    except ConfigError as error:
        problems += [replace(one, where=wanted.name(one.where)) for one in error.problems]
    if problems:
        return []
    _warn_of_memory(flags, loaded[0].config.cpu.capacity, environment)
    hashing = [] if has_flag(flags, HASH) or has_flag(flags, FILE) else [HASH, STABLE_HASH]
    return [TRANSFER, json.dumps(transfer), *hashing]


def _warn_of_unused_variables(environment: Mapping[str, str]) -> None:
    for name in (CPU_VARIABLE, DISK_VARIABLE):
        if environment.get(name):
            _print_line(f"{name} is ignored because {TRANSFER} or {FILE} is given")


def _warn_of_memory(flags: list[str], capacity: int, environment: Mapping[str, str]) -> None:
    """Warn now if vLLM's share of the memory does not fit: vLLM would refuse only after half a
    minute."""
    from offload.cli.cpu_platform import is_cpu_build, memory_warning
    from offload.config.memory_limits import memory_limit

    if is_cpu_build() and (line := memory_warning(flags, capacity, environment, memory_limit())):
        _print_line(line)


def _print_line(line: str) -> None:
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


def add_options(wanted: WantedTiers, given: dict[str, Any] | None, problems: Problems) -> None:
    """Add the options of --kv-extra, which must not set what the other flags set."""
    wanted.has_options = True
    for name, value in (given or {}).items():
        own = wanted.extra.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            repeated = {f"{name}.{field}": f"$.{name}.{field}" for field in own if field in value}
            value = {**value, **own}
        else:
            repeated = {name: f"$.{name}[0].path"} if isinstance(own, list) else {}
        for option, path in repeated.items():
            flag = wanted.sources[path].partition(" ")[0]
            what = f'sets "{option}", and so does {flag}'
            problems.add(EXTRA_OPTION, what, "Give one of them.")
        wanted.extra[name] = own if isinstance(own, list) else value

"""``kvtiers plan``: predicts the effect of a configuration before anything is bought or started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.common import (
    AsJson,
    Problems,
    check_spelling,
    give_up,
    make_app,
    print_json,
    print_line,
    progress_bar,
    screen,
)
from offload.cli.doctor import PASS_FLAGS_ON, ask_vllm, refused_early
from offload.cli.numbers import share_text, size_text, speed_text
from offload.errors import WRONG_USAGE
from policies.registry import DEFAULT_TIER_POLICY

if TYPE_CHECKING:
    from offload.admin.capacity_plan import CapacityEstimate, Machine, ModelSize, Simulated
    from policies.simulation.trace import Trace

app = make_app()

BLOCK_TOKENS = 16
"""Tokens of a block if neither a model nor a trace gives the number."""
YEARS = 5.0

MixText = Annotated[
    str,
    typer.Option(
        help="Simulated requests instead of a trace, e.g. users=200,turns=6. Other names: gap, "
        "hours, system, prompt, answer (the last three in tokens)."
    ),
]
DiskPolicy = Annotated[
    str, typer.Option(help=f"Policy of the disk tier. (default: {DEFAULT_TIER_POLICY})")
]
Prefill = Annotated[
    float, typer.Option(min=0, help="Prompt tokens that the server computes per second.")
]
Tflops = Annotated[
    float, typer.Option(min=0, help="Peak TFLOPS of all GPUs, to estimate the prefill speed.")
]
Parameters = Annotated[
    float, typer.Option(min=0, help="Active parameters, e.g. 8e9. (default: the model's)")
]
Endurance = Annotated[
    str, typer.Option(help="Bytes that may be written to the disk in its lifetime, e.g. 1200TB.")
]
TokenBytes = Annotated[
    str, typer.Option(help="Bytes of one token's KV on all ranks, instead of a model.")
]


@app.command(context_settings=PASS_FLAGS_ON)
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model as for vllm serve, or --token-bytes.")] = "",
    cpu: Annotated[str, typer.Option(help="Size of the CPU tier, e.g. 64GiB.")] = "",
    disk: Annotated[str, typer.Option(help="Size of the disk tier, e.g. 2TiB.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Requests (see kvtiers simulate).")] = None,
    mix: MixText = "",
    policy: Annotated[str, typer.Option(help="Policy of the CPU tier.")] = "adaptive",
    disk_policy: DiskPolicy = "",
    link: Annotated[str, typer.Option(help="Bytes per second to each GPU, e.g. 25GB.")] = "",
    disk_read: Annotated[str, typer.Option(help="Bytes per second of the disk, e.g. 3GB.")] = "",
    prefill_tokens_per_s: Prefill = 0.0,
    gpu_tflops: Tflops = 0.0,
    parameters: Parameters = 0.0,
    write_budget: Annotated[str, typer.Option(help="Maximum bytes written a day, e.g. 2TB.")] = "",
    endurance: Endurance = "",
    years: Annotated[float, typer.Option(min=0.1, help="Years that the disk must last.")] = YEARS,
    token_bytes: TokenBytes = "",
    as_json: AsJson = False,
) -> None:
    """Predict how much tiers of these sizes hold, how many tokens hit, and whether loading pays.

    All other flags are those of vllm serve. Hit rates come from the simulator; speeds are the ones
    you give, or estimates that are marked as such. Exits with 1 if the model cannot be offloaded or
    a tier holds no block, 2 if the flags are wrong, 3 if there is no such model, and 4 if vLLM
    itself refuses it.
    """
    from offload.admin.capacity_plan import Machine

    problems = Problems()
    daily = problems.size("--write-budget", write_budget, is_positive=True)
    lifetime = problems.size("--endurance", endurance, is_positive=True)
    if daily and lifetime:
        problems.add("--endurance", "beside --write-budget", "Give one of them.")
    if not disk:
        _refuse_disk_options(problems, disk_read, write_budget, endurance, disk_policy)
    if gpu_tflops and token_bytes and not parameters:
        problems.add("--gpu-tflops", "needs --parameters", "Give it, for example 8e9.")
    machine = Machine(
        cpu_bytes=problems.size("--cpu", cpu, is_positive=True),
        disk_bytes=_disk_size(problems, disk),
        link_bytes_per_s=problems.size("--link", link, is_positive=True),
        disk_bytes_per_s=problems.size("--disk-read", disk_read, is_positive=True),
        prefill_tokens_per_s=prefill_tokens_per_s,
        gpu_flops=gpu_tflops * 1e12,
        write_budget_bytes=daily or lifetime / (365 * years),
    )
    given_bytes = problems.size("--token-bytes", token_bytes, is_positive=True)
    _check(problems, model, token_bytes, context.args, cpu)
    numbers = {"--gpu-tflops": gpu_tflops, "--parameters": parameters, "--years": years}
    _check_finite(problems, numbers)
    requests = _requests(problems, trace, mix)
    policies = _policies(problems, policy, disk_policy or DEFAULT_TIER_POLICY)
    problems.refuse("plan")
    size = _size_of(model, context.args, given_bytes, parameters)
    found = _work_out(size, machine, requests, *policies)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _check(problems: Problems, model: str, given: str, flags: list[str], cpu: str) -> None:
    if not cpu:
        problems.add("--cpu", "is required", "Give the memory of the CPU tier, e.g. 64GiB.")
    if model.startswith("-"):  # options are passed on to vLLM only after a model
        problems.add(model, "is not an option", "Flags of vLLM come after MODEL; see --help.")
    elif bool(model) == bool(given):
        what = (
            "both MODEL and --token-bytes are given"
            if model
            else "neither MODEL nor --token-bytes is given"
        )
        problems.add("MODEL", what, "Give a model, or --token-bytes 128KiB.")
    elif flags and not model:
        problems.add(flags[0], "is not an option", "Flags of vLLM come after MODEL; see --help.")
    elif model:
        known = [option for parameter in _parameters() for option in parameter.opts]
        check_spelling(problems, "plan", known, flags)


def _refuse_disk_options(problems: Problems, *texts: str) -> None:
    names = ("--disk-read", "--write-budget", "--endurance", "--disk-policy")
    for name, text in zip(names, texts, strict=True):
        if text:
            problems.add(name, "has no effect without a disk tier", "Give --disk.")


def _check_finite(problems: Problems, given: dict[str, float]) -> None:
    for name, value in given.items():
        if not math.isfinite(value):
            problems.add(name, f"must be a finite number (got {value:g})", "Give a number.")


def _disk_size(problems: Problems, text: str) -> int:
    """The size of the disk tier, which must be larger than its smallest index. Whether the model's
    records fit beside the index is checked later, when the model is known."""
    from tiers.lmdb.files import payload_capacity_bytes

    found = problems.size("--disk", text)
    try:
        if found > 0:
            payload_capacity_bytes(found, record_bytes=found)
    except ValueError as error:
        what, _, fix = str(error).partition(". ")
        problems.add("--disk", f'{what} (got "{text}")', f"{fix}.")
    return found


def _parameters() -> list[Any]:
    return list(typer.main.get_command(app).params)


def _policies(problems: Problems, *texts: str) -> tuple[str, ...]:
    """The given policies of the CPU tier and the disk tier; checks them."""
    from policies.registry import make_policy
    from policies.simulation.jobs import parse_spec

    for where, text in zip(("--policy", "--disk-policy"), texts, strict=True):
        try:
            make_policy(parse_spec(text))
        except ValueError as error:
            problems.add(where, str(error))
    return texts


def _requests(problems: Problems, trace: Path | None, mix: str) -> Trace | str | None:
    """The given trace, or the mix as text: the mix becomes a trace only when the model's block size
    is known."""
    from policies.simulation.synthetic_trace import Mix
    from policies.simulation.trace_formats import read_trace

    if trace is not None and mix:
        problems.add("--mix", "beside --trace", "Give one of them.")
    try:
        if trace is not None:
            return read_trace(trace)
        Mix.parse(mix)
    except OSError as error:
        problems.add("--trace", f"cannot be read ({error.strerror}): {trace}")
    except ValueError as error:
        problems.add("--trace" if trace else "--mix", str(error))
    return mix or None


def _size_of(model: str, flags: list[str], given: int, parameters: float) -> ModelSize:
    """Get the model's geometry from vLLM, unless bytes per token were given."""
    from offload.admin.capacity_plan import ModelSize
    from offload.admin.doctor import EXIT_CODES, ModelVerdict

    if given:
        return ModelSize("", given, BLOCK_TOKENS, parameters=parameters)
    report = refused_early(model, flags) or ask_vllm(model, flags)
    if not report.groups or not report.token_bytes:
        reasons = report.refused or ("it has no KV caches that can be offloaded",)
        why = "; ".join([*reasons, *report.fixes]).removeprefix(f"{model} ")
        where = "" if report.verdict == ModelVerdict.WRONG_FLAGS else f"MODEL {model}: "
        give_up("plan", f"{where}{why}", EXIT_CODES[report.verdict] or 1)
    return ModelSize(
        model,
        report.token_bytes * report.ranks,
        report.alignment_tokens,
        report.ranks,
        parameters or report.parameters,
    )


def _work_out(
    size: ModelSize, machine: Machine, requests: Trace | str | None, policy: str, disk_policy: str
) -> CapacityEstimate:
    from offload.admin.capacity_plan import estimate_capacity
    from policies.simulation.synthetic_trace import Mix, mix_trace

    trace = (
        mix_trace(Mix.parse(requests), size.chunk_tokens) if isinstance(requests, str) else requests
    )
    if trace is not None and not trace.requests:
        fix = "Give more hours, or longer prompts"
        give_up(
            "plan",
            f"--mix: makes no prompt of {trace.block_tokens} tokens or more. {fix}",
            WRONG_USAGE,
        )
    block_tokens = trace.block_tokens if trace else size.chunk_tokens
    try:
        _check_tiers(size, machine, block_tokens)
        simulated = _simulate(trace, size, machine, policy, disk_policy) if trace else None
        return estimate_capacity(size, machine, block_tokens, simulated)
    except ValueError as error:  # the text may already begin with the option's name
        text = str(error)
        where = "" if text.startswith("--") else f"--disk {size_text(machine.disk_bytes)}: "
        give_up("plan", f"{where}{text}")


def _check_tiers(size: ModelSize, machine: Machine, block_tokens: int) -> None:
    """Raise ``ValueError`` if a tier would always be empty."""
    from offload.admin.capacity_plan import capacity_blocks

    given = {"--cpu": machine.cpu_bytes, "--disk": machine.disk_bytes}
    for (name, given_bytes), blocks in zip(
        given.items(), capacity_blocks(size, machine, block_tokens), strict=True
    ):
        if given_bytes and not blocks:
            what = f"holds no block of {block_tokens} tokens"
            needed = size_text(size.token_bytes * block_tokens)
            raise ValueError(f"{name} {size_text(given_bytes)} {what} ({needed}). Give more")


def _simulate(
    trace: Trace, size: ModelSize, machine: Machine, policy: str, disk_policy: str
) -> Simulated:
    from offload.admin.capacity_plan import Simulated, capacity_blocks
    from policies.registry import make_policy
    from policies.simulation.jobs import parse_spec
    from policies.simulation.simulator import bound, simulate
    from policies.simulation.two_tiers import simulate_two

    cpu, disk = capacity_blocks(size, machine, trace.block_tokens)
    upper = make_policy(parse_spec(policy))
    with progress_bar(is_bytes=False) as bar:
        task = bar.add_task("simulated requests", total=len(trace.requests))

        def advance(count: int) -> None:
            bar.advance(task, count)

        if disk:
            lower = make_policy(parse_spec(disk_policy))
            result = simulate_two(
                trace, upper, lower, (cpu, disk), "write-through", progress=advance
            )
        else:
            result = simulate(trace, upper, cpu, progress=advance)
    return Simulated(trace, result, bound(trace, None))


def _print(found: CapacityEstimate) -> None:
    from policies.simulation.tables import FittingTable

    out = screen()
    model = found.model
    name = model.name or "a model"
    out.print(
        f"{name}: {size_text(model.token_bytes)} per token on {model.ranks} "
        f"rank{'s' * (model.ranks > 1)}; chunks of {model.chunk_tokens} tokens",
        markup=False,
    )
    heads = ("tier", "capacity", "tokens", "chunks", "loads", "loading pays", "hits", "reads")
    table = FittingTable(heads, right=heads[1:])
    for tier in found.tiers:
        table.add_row(
            tier.name,
            size_text(tier.capacity_bytes),
            f"{tier.tokens:,}",
            f"{tier.chunks:,}",
            f"{tier.loads_tokens_per_s:,.0f} tok/s",
            {None: "?", True: "yes", False: "no"}[tier.pays],
            share_text(tier.hit_ratio),
            speed_text(tier.reads_bytes_per_s),
        )
    out.print(table)
    for line in _lines(found):
        print_line(out, line)


def _lines(found: CapacityEstimate) -> list[str]:
    lines = []
    if found.prefill_tokens_per_s is not None:
        lines.append(f"computing: {found.prefill_tokens_per_s:,.0f} prompt tokens/s")
    if found.hit_ratio is not None:
        asked = found.prompt_tokens_per_s
        rate = f" at {asked:,.0f} prompt tokens/s" if asked else ""
        lines.append(f"requests: {found.requests}{rate}")
        lines.append(
            f"hits: {share_text(found.hit_ratio)} of the prompt tokens (an infinite cache: "
            f"{share_text(found.hit_ratio_max)}); "
            f"{share_text(found.compute_saved)} of the arithmetic saved"
        )
    else:
        lines.append("hits: give --trace or --mix to simulate them")
    if found.disk_writes_per_day is not None:
        text = f"disk writes: {size_text(found.disk_writes_per_day)} per day"
        if found.write_budget:
            share = found.disk_writes_per_day / found.write_budget
            text += f", {share_text(share)} of the budget of {size_text(found.write_budget)}"
        lines.append(text)
    return lines + [f"note: {note}" for note in found.notes]

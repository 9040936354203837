"""Searches flags of ``vllm serve``, and checks --kv-transfer-config without importing vLLM."""

from __future__ import annotations

import json

from offload.errors import ConfigError, Problem

TRANSFER = "--kv-transfer-config"
EXTRA_OPTION = "--kv-extra"
SERVE_OPTIONS = ["--kv-cpu", "--kv-disk", EXTRA_OPTION, "--dry-run"]
"""The options of ``kvtiers serve``, which vLLM does not know."""


def has_flag(flags: list[str], name: str) -> bool:
    """True if a flag is given in one of vLLM's spellings: ``--a-b``, ``--a_b=x``, ``--a-b.c``."""
    heads = {flag.split("=")[0].split(".")[0].replace("_", "-") for flag in flags}
    return name in heads


def flag_values(flags: list[str], name: str) -> list[str]:
    """The values of a flag in ``--a-b x`` or ``--a_b=x``; not those of single fields."""
    found = []
    for position, flag in enumerate(flags):
        head, is_joined, value = flag.partition("=")
        if head.replace("_", "-") == name:
            found += [value] if is_joined else flags[position + 1 : position + 2]
    return found


def transfer_problems(flags: list[str]) -> list[Problem]:
    """Check every --kv-transfer-config in the flags against this machine.

    Folders that another server holds are not reported: a starting server waits for their release.
    """
    from offload.config.kv_transfer_config import check_transfer
    from offload.config.machine_checks import InUse

    problems: list[Problem] = []
    for text in flag_values(flags, TRANSFER):
        try:
            transfer = json.loads(text)
            if isinstance(transfer, dict):
                check_transfer(transfer)
            else:
                problems.append(Problem(TRANSFER, "is not an object", "Write one object in JSON."))
        except ConfigError as error:
            problems += [found for found in error.problems if not isinstance(found, InUse)]
        except (ValueError, RecursionError) as error:
            problem = Problem(TRANSFER, f"is not JSON: {error}", "Write one object in JSON.")
            problems.append(problem)
    return problems

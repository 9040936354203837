"""``kvtiers doctor`` with the installed vLLM: probes the model, reads the settings, and reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from offload.admin.doctor import Facts, ModelVerdict, Report, examine, refusal
from offload.config.kv_transfer_config import NAME, NAMES
from offload.config.machine_checks import load_config
from offload.config.schema import OffloadConfig, default_config
from offload.connector.model.layout import layer_page_bytes, layout_input
from offload.connector.model.probe import PLAIN, FlagsError, Probe, probe
from offload.connector.startup_checks import check_vllm_config, startup_warnings
from offload.errors import ConfigError
from offload.layout.checks import LayoutInput

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOT_FOUND = {"EntryNotFoundError", "HFValidationError", "RepositoryNotFoundError"}
"""Errors of the hub's library. They are compared by name because the library has moved them between
its modules."""
_REPEATED = re.compile(r"([^;]+)(?:; \1)+")


def examine_model(
    model: str, flags: Sequence[str], transfer: Mapping[str, Any] | None = None
) -> Report:
    """Make the report for one model; ``transfer`` replaces the flags' --kv-transfer-config.

    An error raised by vLLM is reported in vLLM's words.
    """
    try:
        found, given = _probe_layout(model, flags, transfer)
    except ConfigError as error:  # vLLM has called the connector to get the layout
        report = examine_model(model, flags, PLAIN)
        problems = [str(problem) for problem in error.problems]
        verdict = ModelVerdict.WRONG_FLAGS if report.ok else report.verdict
        return replace(report, refused=(*problems, *report.refused), verdict=verdict)
    except FlagsError as error:
        reason = f"vLLM does not understand these flags: {_first_words(error)}"
        return refusal(model, ModelVerdict.WRONG_FLAGS, reason)
    except SystemExit as error:  # a flag such as --help, which prints something and exits
        reason = f"vLLM exits with these flags (exit code {error.code})"
        return refusal(model, ModelVerdict.WRONG_FLAGS, reason)
    except Exception as error:  # vLLM may refuse a model or flags with any exception
        verdict = ModelVerdict.UNKNOWN_MODEL if _is_unknown(error) else ModelVerdict.VLLM_REFUSES
        return refusal(model, verdict, f"vLLM itself refuses: {_first_words(error)}")
    config, notes, problems = _configuration(found.vllm_config)

    def ask_again(more: Sequence[str]) -> LayoutInput | None:
        try:
            return _probe_layout(model, [*flags, *more], transfer)[1]
        except (SystemExit, Exception):  # as above; a hint does not need the reason
            return None

    return examine(_facts(model, found, given, notes), config, problems, ask_again)


def _probe_layout(
    model: str, flags: Sequence[str], transfer: Mapping[str, Any] | None
) -> tuple[Probe, LayoutInput]:
    found = probe(model, flags, transfer)
    return found, layout_input(found.kv_cache_config, found.vllm_config, 1)


def _is_unknown(error: Exception) -> bool:
    """True if vLLM found no such model, neither as a folder nor on the hub."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # vLLM also raises this when no hub responds
    is_lost = isinstance(error, OSError) or bool(names & NOT_FOUND)
    return is_lost or "Invalid repository ID or local directory" in str(error)


def _first_words(error: Exception) -> str:
    """The first words of vLLM's error, without the lines about the input that pydantic adds, and
    without what is repeated for each layer."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = [line for line in lines if line.startswith("Value error, ")]
    text = wrapped[0].removeprefix("Value error, ") if wrapped else " ".join(lines)
    return _REPEATED.sub(r"\1", text.split(" [type=")[0]) or type(error).__name__


def _facts(model: str, found: Probe, given: LayoutInput, notes: Sequence[str]) -> Facts:
    asked = (
        f"from vLLM {vllm.__version__} on its {found.platform} platform; block sizes may "
        "differ on others"
    )
    return Facts(
        model=model,
        ranks=found.vllm_config.parallel_config.world_size,
        given=given,
        kernel_tokens=found.kernel_tokens,
        pages=tuple(_pages(group) for group in found.kv_cache_config.kv_cache_groups),
        asked_block=found.asked_block,
        notes=(*notes, asked),
        parameters=found.parameters * found.vllm_config.parallel_config.world_size,
    )


def _pages(group: KVCacheGroupSpec) -> tuple[tuple[int, int], ...]:
    """The bytes of each layer's page, without and with padding."""
    spec = group.kv_cache_spec
    whole = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return tuple(
        (page, whole.get(name, spec).page_size_bytes)
        for name, page in layer_page_bytes(group).items()
    )


def _configuration(vllm_config: VllmConfig) -> tuple[OffloadConfig, list[str], list[str]]:
    """The offloading configuration with notes and problems.

    The notes contain the warnings that a starting server would log. The settings of another
    connector are not read.
    """
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector not in NAMES:
        problem = f"--kv-transfer-config names {transfer.kv_connector}, which is not {NAME}"
        return default_config()[0], [], [problem]
    roles = [str(problem) for problem in check_vllm_config(vllm_config)]
    if not extra:
        config, notes = default_config()
        return config, [*notes, *startup_warnings(vllm_config, config)], roles
    try:
        loaded = load_config(extra)
    except ConfigError as error:
        return default_config()[0], [], [*roles, *(str(problem) for problem in error.problems)]
    warnings = startup_warnings(vllm_config, loaded.config)
    return loaded.config, [*loaded.notes, *map(str, loaded.warnings), *warnings], roles

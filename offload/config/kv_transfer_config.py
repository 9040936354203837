"""Makes the value of vLLM's ``--kv-transfer-config`` for this connector, and searches such a value
for the connector."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError, Problem

if TYPE_CHECKING:
    from offload.config.machine_checks import LoadedConfig
    from offload.namespaces.wait_for_owners import Patience

NAME = "KvTiersConnector"
ALIASES = ("OffloadConnector",)
"""Earlier names, which stay valid."""
NAMES = (NAME, *ALIASES)
MODULE = "offload.connector"
EXTRA = "kv_connector_extra_config"
FIELDS = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", EXTRA),
    *("engine_id", "kv_buffer_device", "kv_port", "enable_permute_local_kv"),
)
"""The fields of vLLM 0.32's ``KVTransferConfig``. Other versions have others, so only a name that
resembles one of these is taken for a mistake."""
FAILURE_POLICIES = ("recompute", "fail")


def transfer_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The complete value for one of our configurations. It sets ``recompute``: by default vLLM ends
    a request with an error if its load fails."""
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        EXTRA: dict(extra),
    }


def check_transfer(
    transfer: Mapping[str, Any], patience: Patience | None = None
) -> list[LoadedConfig]:
    """Check every configuration of this connector in a transfer configuration against this machine.

    With ``patience``, wait for servers that hold the folders and may be about to end. Raises
    ``ConfigError`` with all problems. Returns nothing for other connectors.
    """
    from offload.config.machine_checks import patiently  # late: other callers need only names

    if patience is None:
        return _check_now(transfer)
    return patiently(lambda: _check_now(transfer), patience)


def _check_now(transfer: Mapping[str, Any]) -> list[LoadedConfig]:
    from offload.config.machine_checks import load_config

    loaded: list[LoadedConfig] = []
    problems: list[Problem] = []
    option = EXTRA
    for found in ours(transfer):
        if wrong := field_problems(found):
            problems += wrong
            option = "--kv-transfer-config"
        extra = found.get(EXTRA)
        if not isinstance(extra, Mapping | None):
            continue
        try:
            loaded.append(load_config(extra or {}))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems, option)
    return loaded


def ours(transfer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Find the transfer configurations that name this connector, also in vLLM's
    ``MultiConnector``."""
    if transfer.get("kv_connector") in NAMES:
        yield transfer
    extra = transfer.get(EXTRA)
    if transfer.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        inner = extra.get("connectors")
        for one in inner if isinstance(inner, list) else []:
            if isinstance(one, Mapping):
                yield from ours(one)


def field_problems(transfer: Mapping[str, Any]) -> list[Problem]:
    """Check vLLM's own fields, which vLLM would refuse only after it has loaded for a while."""
    from offload.config.fields import show  # late: other callers need only names
    from offload.config.options import TOP_FIELDS

    problems = role_problems(transfer.get("kv_role"))
    options = {field.name for field in TOP_FIELDS}
    for name in transfer:
        if name in options:
            problems.append(Problem(name, "is in the wrong place", f'Move it to "{EXTRA}".'))
        elif name not in FIELDS and (near := difflib.get_close_matches(name, FIELDS, 1, 0.8)):
            problems.append(Problem(name, "is unknown", f'Write "{near[0]}".'))
    module = transfer.get("kv_connector_module_path")
    if module is not None and not _has_connector(module):
        what = f"is not the connector's module (got {show(module)})"
        problems.append(Problem("kv_connector_module_path", what, f'Write "{MODULE}".'))
    policy = transfer.get("kv_load_failure_policy", "fail")
    if policy not in FAILURE_POLICIES:
        what = f'must be "recompute" or "fail" (got "{policy}")'
        fix = 'Use "recompute": if a load fails, vLLM recomputes the request.'
        problems.append(Problem("kv_load_failure_policy", what, fix))
    extra = transfer.get(EXTRA)
    if not isinstance(extra, Mapping | None):
        what = f"must be an object (got {extra!r})"
        problems.append(Problem(EXTRA, what, 'Write {"cpu": {...}, "tiers": [...]}.'))
    return problems


def _has_connector(module: object) -> bool:
    """False if vLLM could not import the connector from this module. A module of another package
    may offer it, too: vLLM imports that one itself."""
    if module in (MODULE, f"{MODULE}.connector"):
        return True
    if not isinstance(module, str) or module.partition(".")[0] == MODULE.partition(".")[0]:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
    except Exception:  # whatever its package raises; an empty name is a ValueError
        return bool(module)


def role_problems(role: object) -> list[Problem]:
    """Check that this connector both loads and stores."""
    if role == "kv_both":
        return []
    if role is None:
        return [Problem("kv_role", "is missing", 'Use "kv_role": "kv_both".')]
    what = f'must be "kv_both", because this connector loads and stores (got "{role}")'
    return [Problem("kv_role", what, "")]

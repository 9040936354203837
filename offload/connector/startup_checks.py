"""Checks vLLM's settings at start: which ones kvtiers refuses, and which ones it warns about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.config.kv_transfer_config import role_problems
from offload.config.schema import OffloadConfig
from offload.connector.model.identity import model_path_of, seed_is_random, weights_of
from offload.connector.model.process_config import configs_of
from offload.errors import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENGINE_ID = (
    'To use stored blocks again after a restart, set "engine_id" in --kv-transfer-config to a name '
    "for these weights, and to another name whenever they change"
)


def check_vllm_config(vllm_config: VllmConfig) -> list[Problem]:
    """Check the settings of ``--kv-transfer-config`` itself; raise for settings that cannot
    work."""
    transfer = vllm_config.kv_transfer_config
    return role_problems(transfer.kv_role) if transfer is not None else []


def recompute_failed_loads(vllm_config: VllmConfig) -> bool:
    """Make vLLM recompute tokens that could not be loaded; return whether the setting had to be
    changed.

    By default vLLM ends such requests with an error, although nothing is lost. vLLM reads the
    setting from its own configuration after it has created its connector; a connector inside a
    ``MultiConnector`` has only a copy of that configuration.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    found = [vllm_config, *configs_of(transfer.engine_id)]
    wrong = [each for each in found if each.kv_transfer_config.kv_load_failure_policy == "fail"]
    for each in wrong:
        each.kv_transfer_config.kv_load_failure_policy = "recompute"
    return bool(wrong)


def startup_warnings(vllm_config: VllmConfig, config: OffloadConfig) -> list[str]:
    """Warnings for the user before the server starts; each line says what to do.

    Reads the model's files; raises ``OSError``.
    """
    lines = _hash_warnings(vllm_config) if config.tiers else []
    if not vllm_config.cache_config.enable_prefix_caching:
        lines.append(
            "prefix caching is off: blocks are still stored and loaded by their hashes. Set "
            "--enable-prefix-caching to reuse them on the device as well"
        )
    return lines + (_weight_warnings(vllm_config) if config.tiers else [])


def _hash_warnings(vllm_config: VllmConfig) -> list[str]:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    use = "Use --prefix-caching-hash-algo sha256_cbor"
    lines = []
    if seed_is_random(vllm_config):
        lines.append(
            f"with {algorithm} and no PYTHONHASHSEED, block hashes change at every start: nothing "
            f"on disk will be found after a restart. {use}"
        )
    if algorithm.startswith("xxhash"):
        lines.append(
            f"{algorithm} is not collision resistant: a client who can choose prompts could make "
            f"two of them share blocks. {use} where clients do not trust each other"
        )
    if algorithm == "sha256":
        lines.append(
            f"sha256 hashes pickled content, and equal content can have different pickles: this "
            f"costs hits after a restart but never causes a wrong hit. {use}"
        )
    return lines


def _weight_warnings(vllm_config: VllmConfig) -> list[str]:
    model, load = vllm_config.model_config, vllm_config.load_config
    kind = weights_of(vllm_config, model, load, model_path_of(vllm_config, model))["kind"]
    why = {
        "unknown": f"no weight files were found for {model.model}: kvtiers cannot distinguish "
        "them from other weights under the same name",
        "dummy": "the weights are dummies (--load-format dummy): real ones may be pushed before "
        "the first request, and kvtiers cannot identify them",
        "pushed": "the weights will be pushed (--weight-transfer-config), and kvtiers "
        "cannot identify them",
    }.get(kind)
    lines = [f"{why}. Stored blocks are not used after a restart. {ENGINE_ID}"] if why else []
    if callable(model.hf_overrides):
        lines.append(
            "hf_overrides is a function, and kvtiers knows only its name. Clear the tiers' "
            "folders whenever the function changes"
        )
    return lines

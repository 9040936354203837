"""Finds vLLM's complete configuration when vLLM passes only a part or a copy of it."""

from __future__ import annotations

import gc

from vllm.config import VllmConfig


def configs_of(engine_id: str | None) -> list[VllmConfig]:
    """The configurations in this process of the engine with this id.

    The result includes vLLM's own configuration and the copies that it made for connectors inside a
    connector. The search visits every object of the process, so it runs only at start.
    """
    return [
        each for each in gc.get_objects() if type(each) is VllmConfig and _is_of(each, engine_id)
    ]


def _is_of(config: VllmConfig, engine_id: str | None) -> bool:
    transfer = getattr(config, "kv_transfer_config", None)  # the object may be half constructed
    return transfer is not None and transfer.engine_id == engine_id

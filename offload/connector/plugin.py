"""vLLM's general plugin: registers the connector under its short name."""

from __future__ import annotations

NAME = "OffloadConnector"


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "offload.connector", NAME)
    except ValueError:
        return  # registered before in this process

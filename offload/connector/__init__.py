"""The vLLM connector: the only package of this project that imports vllm.

vLLM finds ``OffloadConnector`` here by ``kv_connector_module_path``. It is imported on first use,
because vLLM loads the plugin (`offload.connector.plugin`) while it is still importing itself.
"""

from __future__ import annotations

from typing import Any

__all__ = ["OffloadConnector"]


def __getattr__(name: str) -> Any:
    if name == "OffloadConnector":
        from offload.connector.connector import OffloadConnector

        return OffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

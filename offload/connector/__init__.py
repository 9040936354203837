"""The vLLM connector: the only package of this project that imports vllm.

vLLM finds ``OffloadConnector`` here by ``kv_connector_module_path``. It is imported on first use,
because vLLM loads the plugin (`offload.connector.plugin`) while it is still importing itself.
`offload.connector.contract.at_start` looks at an untested vLLM first.
"""

from __future__ import annotations

from typing import Any

__all__ = ["OffloadConnector"]


def __getattr__(name: str) -> Any:
    if name == "OffloadConnector":
        from offload.connector.contract.at_start import check_installed

        check_installed()
        from offload.connector.connector import OffloadConnector

        return OffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

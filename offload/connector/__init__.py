"""The vLLM connector: the only package of this project that imports vllm.

vLLM finds ``KvTiersConnector`` here by ``kv_connector_module_path``; its earlier name
``OffloadConnector`` stays valid. The class is imported on first use, because vLLM loads the plugin
(`offload.connector.plugin`) while vLLM itself is still being imported. Before that import,
`offload.connector.contract.at_start` checks the installed vLLM if its version was not tested.

Owns everything that knows vLLM.

Must not know how bytes move, or how a tier keeps its records.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvTiersConnector", "OffloadConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from offload.connector.contract.at_start import check_installed

        check_installed()
        from offload.connector.connector import KvTiersConnector

        return KvTiersConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

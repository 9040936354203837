"""``vllm serve`` under the model runner, and on the simulated processor, of the tests:
``python -m tests.vllm.serve_cli serve ...``.

Processes that vLLM spawns import this module again, before anything of vLLM's, so that they do the
same.
"""

from __future__ import annotations

from tests import model_runner, processor

processor.pretend()
model_runner.pretend()
processor.pretend_in_layers()

if __name__ == "__main__":
    from offload.connector.vllm_cli import add_missing_version

    add_missing_version()
    from vllm.entrypoints.cli.main import main

    main()

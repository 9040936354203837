"""``vllm serve`` under the model runner of the tests: ``python -m tests.vllm.serve_cli serve ...``.

Processes that vLLM spawns import this module again, before anything of vLLM's, so that they use the
same runner.
"""

from __future__ import annotations

from tests import model_runner, processor

processor.pretend()
model_runner.pretend()

if __name__ == "__main__":
    from offload.connector.vllm_cli import add_missing_version

    add_missing_version()
    from vllm.entrypoints.cli.main import main

    main()

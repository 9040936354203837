"""Let vLLM look at model classes in this process.

Otherwise the first use of each model class on a machine imports vLLM in another process, which
takes 8 to 15 s, and keeps the result in a folder of the user.
"""

from __future__ import annotations


def inspect_models_here() -> None:
    """Call this once per process, before the first model's configuration is made."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()

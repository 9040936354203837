"""Sends this project's log lines to vLLM's log.

Separate from the connector, because this needs nothing of vLLM but the name of its logger.
"""

from __future__ import annotations

import logging

PACKAGES = ("offload", "tiers", "policies")


def adopt_vllm_logging() -> None:
    """Send the lines of this project's loggers to the handlers of vLLM's logger, at its level.

    Does not touch loggers that the user has configured. Idempotent.
    """
    vllm = logging.getLogger("vllm")
    for name in PACKAGES:
        ours = logging.getLogger(name)
        if ours.handlers or not vllm.handlers:
            continue
        ours.handlers = list(vllm.handlers)
        ours.setLevel(vllm.getEffectiveLevel())
        ours.propagate = False

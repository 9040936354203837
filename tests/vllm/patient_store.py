"""Lets an engine wait for a Mooncake store as long as a busy machine needs.

Without this, an engine computes a prompt whose blocks are in the store if the master does not
answer for some seconds. That is right for users, but a test cannot tell it from a wrong lookup.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.patience import PATIENCE_S
from tests.vllm.engine import Engine
from tests.vllm.faults import executor, on_workers
from tests.vllm.probes import connector
from tiers.io import timed_calls

PATIENT_ENV = {"MC_RPC_TIMEOUT_MS": str(int(PATIENCE_S * 1000))}
"""The environment of the engine: Mooncake's timeout for calls of its master."""


def be_patient(engine: Engine) -> None:
    """Let lookups of this engine wait for the store, without counting a late answer as a
    failure."""
    engine.call(_wait_for_replies)
    engine.call(on_workers, _wait_for_the_store)


def _wait_for_replies(llm: Any) -> None:
    presence = connector(llm).serving.side.planner.presence
    presence.limits = replace(presence.limits, lookup_timeout_s=PATIENCE_S)


def _wait_for_the_store(worker: Any) -> None:
    timed_calls.ANSWER_TIMEOUT_S = PATIENCE_S
    for watch in executor(worker)._presence_queries._watches:
        watch._timeout_s = PATIENCE_S

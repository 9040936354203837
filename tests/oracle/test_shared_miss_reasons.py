"""Reasons for misses that only shared tiers produce; ``test_miss_reasons.py`` has the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from offload.config.schema import TierConfig
from offload.messages.report import PresenceReply
from offload.requests.miss_reasons import Reason
from offload.worker.presence_queries import PresenceQueries
from tests.oracle.serving import Conditions
from tests.oracle.test_shared import PROMPT, request, two


@pytest.mark.parametrize("how", ["late", "it cannot say", "shut out"])
def test_a_shared_tier_does_not_reply(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier's content is unknown then, which is different from a chunk that was never stored."""
    may_say = asyncio.Event()

    async def silent(self: Any, query: Any) -> PresenceReply:
        if how == "late":
            await may_say.wait()
        return PresenceReply(None)

    monkeypatch.setattr(TierConfig, "shared", True)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(PresenceQueries, "answer", silent)
    engine, other = two(tmp_path, 1, Conditions(slots=80), lookup_timeout_s=0.05)
    with engine, other:
        health = engine.planner.health[0]
        if how == "shut out":
            health.reads._open(time.monotonic(), 1e6)
        request(engine, PROMPT)
        log = engine.connector.serving.side.log
        while not log.last:
            engine.step()
        miss = log.last[-1].miss
        may_say.set()
        engine.drain()
    assert miss.reason is (Reason.BREAKER if how == "shut out" else Reason.UNANSWERED)
    assert miss.tier == "file"


def test_every_reason_is_tested() -> None:
    """Each reason must occur by name in one of the two files."""
    files = (Path(__file__), Path(__file__).with_name("test_miss_reasons.py"))
    text = "".join(file.read_text() for file in files)
    assert [r.name for r in Reason if f"Reason.{r.name}" not in text] == []

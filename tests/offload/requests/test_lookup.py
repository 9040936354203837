"""Tests what a request may load, by its prompt and by its client's options."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offload.index.chunk_batch import RequestOrigin
from offload.index.request_options import Controls
from offload.layout.prefix_match import PrefixMatcher
from offload.requests.lookup import Lookups
from offload.requests.request_identity import RequestIdentity
from offload.requests.request_log import RequestLog
from offload.requests.request_state import RequestState
from tests.offload.requests.test_hit_search import CHUNK, HASHES, LAYOUT, planner_with


@dataclass(frozen=True)
class Prompt:
    request_id: str = "r"
    num_tokens: int = len(HASHES) * CHUNK
    num_prompt_tokens: int = num_tokens
    block_hashes: tuple[bytes, ...] = tuple(HASHES)
    trace_headers: None = None


@pytest.mark.parametrize(("tokens", "loaded"), [(0, 0), (CHUNK - 1, 0), (3 * CHUNK, 3), (900, 7)])
def test_a_client_limits_what_is_loaded(tokens: int, loaded: int) -> None:
    """vLLM holds two of the nine chunks that the tiers hold."""
    identity = RequestIdentity("r", LAYOUT)
    origin = RequestOrigin(controls=Controls(max_load_tokens=tokens))
    identity.take_options(origin, (), client_asked=True)
    lookups = Lookups(PrefixMatcher(LAYOUT), planner_with(9), RequestLog())
    assert lookups.look_up(RequestState(identity), Prompt(), 2 * CHUNK) == loaded * CHUNK

"""Clients' hints in ``kv_transfer_params`` reach the policies; invalid ones are ignored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo, RequestOrigin
from offload.index.request_options import NO_HINTS, RequestHints
from offload.index.tier_index import TierIndex
from offload.messages.report import JobResult, StepReport
from offload.planner.planner import Planner
from offload.requests.parse_options import parse_hints
from policies import hints as names
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy

GROUP = 0
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(8)]


def read(**options: Any) -> tuple[RequestHints, list[str]]:
    return parse_hints({"kvtiers": options, "do_remote_prefill": True})


def test_all_hints_are_read() -> None:
    hints, rejected = read(
        session="c-17", session_end=True, one_shot=True, tool_call=True, return_s=17, pinned=64
    )
    assert rejected == []
    assert hints.stored == {names.SESSION: "c-17", names.ONE_SHOT: True}
    assert hints.ended == {names.SESSION_END: True, names.TOOL_CALL: True, names.RETURN_S: 17}
    assert names.PINNED in hints.of_chunk(64)
    assert hints.of_chunk(80) == hints.stored


def test_a_whole_prompt_can_be_pinned() -> None:
    hints, rejected = read(pinned=True)
    assert not rejected
    assert hints.of_chunk(10**9) == hints.ended == {names.PINNED: True}


def test_more_tokens_than_a_float_can_express_mean_all_tokens() -> None:
    hints, rejected = read(pinned=10**400)
    assert not rejected
    assert hints.of_chunk(10**9) == {names.PINNED: True}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"kvtiers": None}, 3])
def test_no_hints(params: object) -> None:
    assert parse_hints(params) == (NO_HINTS, [])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"sesion_end": True}, "no hint 'sesion_end'"),
        ({"session_end": "yes"}, "true or false"),
        ({"session_end": 1}, "true or false"),
        ({"return_s": -1}, "seconds from 0"),
        ({"return_s": float("nan")}, "seconds from 0"),
        ({"return_s": True}, "seconds from 0"),
        ({"pinned": -3}, "number of tokens"),
        ({"pinned": 2.5}, "number of tokens"),
        ({"session": ""}, "text of at most"),
        ({"session": "x" * 257}, "text of at most"),
        ({"session": ["a"]}, "text of at most"),
        ({3: True}, "no hint 3"),
    ],
)
def test_a_wrong_hint_is_ignored_and_the_others_stay(options: dict[Any, Any], part: str) -> None:
    hints, rejected = parse_hints({"kvtiers": {**options, "one_shot": True}})
    assert hints == RequestHints({names.ONE_SHOT: True})
    assert len(rejected) == 1
    assert part in rejected[0]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(names.NAMES) | st.text(), inner)
    ),
)


@given(_json)
def test_nothing_that_a_client_sends_raises(value: Any) -> None:
    for params in (value, {"kvtiers": value}):
        hints, _ = parse_hints(params)
        hash(hints.stored.get(names.SESSION))


class Spy(LruPolicy):
    """LRU that records its calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def insert(self, key: Any, info: EntryInfo) -> None:
        self.calls.append(("insert", (key, info)))
        super().insert(key, info)

    def touch(self, keys: Any) -> None:
        self.calls.append(("touch", list(keys)))
        super().touch(keys)

    def advise(self, keys: Any, hints: Any) -> None:
        self.calls.append(("advise", (list(keys), hints)))


def _planner() -> tuple[Planner, Spy, Spy]:
    above, below = Spy(), Spy()
    groups = {GROUP: GroupInfo("full", 16, (100,))}
    cpu = TierIndex("cpu", SlotCapacity(8, 0), above)
    lower = TierIndex("disk", ByteCapacity(1000), below)
    return Planner(groups, cpu, [lower]), above, below


def _wanted(count: int, origin: RequestOrigin) -> ChunkBatch:
    depths = range(16, 16 * (count + 1), 16)
    return ChunkBatch(KEYS[:count], GROUP, list(range(count)), depths, origin)


def _answer(planner: Planner) -> None:
    """Let every job of the next step succeed."""
    step = planner.step()
    jobs = [*step.stores, *step.write_throughs]
    planner.complete(StepReport({job.job: JobResult() for job in jobs}))


def test_policies_get_all_facts_about_a_chunk_in_every_tier() -> None:
    planner, above, below = _planner()
    origin = RequestOrigin(b"salt", read(session="s", pinned=16)[0])
    planner.stores.plan(_wanted(2, origin))
    _answer(planner)
    _answer(planner)
    for spy, size in ((above, 1), (below, 100)):
        infos = dict(value for what, value in spy.calls if what == "insert")
        head, tail = infos[KEYS[0]], infos[KEYS[1]]
        assert (head.kind, head.depth_tokens, tail.depth_tokens) == ("full", 16, 32)
        assert (head.salt, head.size_bytes) == (b"salt", size)
        assert head.hints == {names.SESSION: "s", names.PINNED: True}
        assert tail.hints == {names.SESSION: "s"}
        assert 16 < head.cost < tail.cost < 17


def test_the_use_of_a_request_comes_after_its_last_chunk_and_with_its_hints() -> None:
    """The last chunks of the request are still being stored when it ends."""
    planner, above, below = _planner()
    end = {names.SESSION_END: True}
    planner.stores.plan(_wanted(2, RequestOrigin()))
    planner.uses.ended(KEYS[:2], end)
    assert above.calls == []
    _answer(planner)
    assert [what for what, _ in above.calls] == ["insert", "insert", "touch", "advise"]
    assert above.calls[-2:] == [("touch", KEYS[:2]), ("advise", (KEYS[:2], end))]
    assert below.calls == [("advise", (KEYS[:2], end))], "the tier holds none of the chunks yet"


def test_a_use_is_reported_even_if_the_store_is_cancelled() -> None:
    planner, above, _ = _planner()
    planner.stores.plan(_wanted(2, RequestOrigin()))
    planner.uses.ended(KEYS[:2])
    planner.stores.fence([0])
    assert above.calls == [("touch", KEYS[:2])]

"""Loading and computing under vLLM's real scheduler, over a disk with a queue."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from offload.planner.load_or_recompute import SAMPLES_MIN, LoadOrRecompute, ShortenReason
from offload.requests.miss_reasons import Reason
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions
from tests.oracle.test_look_ahead import CHUNKS, PROMPTS, TOKENS, Backlog, prompts_of

COMPUTED, CHUNK = 32, 4
"""Tokens that vLLM computes in a step, and tokens of a chunk. A step counts as one second."""


@pytest.fixture(autouse=True)
def no_short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration of short loads is measured in this machine's time, not in steps."""
    monkeypatch.setattr(LoadOrRecompute, "tokens_min", 0.0)


def world(
    folder: Path, answer_tokens: int, batched_tokens: int = COMPUTED, **options: object
) -> Backlog:
    options = {"max_load_gpu_share": 1.0} | options
    conditions = Conditions(slots=400, batched_tokens=batched_tokens, late=20, options=options)
    served = Backlog(dataclasses.replace(MODELS["full"], blocks=300), conditions, folder, 0)
    served.answer_tokens_again = answer_tokens
    return served


def measured(served: Backlog, chunks_per_step: int) -> None:
    """Set both measured speeds of the planner, in tokens per step."""
    for _ in range(SAMPLES_MIN):
        served.planner.health[0].loaded(1000, 1000 / (chunks_per_step * CHUNK), 0.0)
        served.planner.health.computed(1000, 1000 / COMPUTED)
    assert served.planner.health[0].break_even.pays


def serve_all(served: Backlog) -> tuple[int, float]:
    """Serve all requests; returns the number of steps, and the mean of steps to first tokens."""
    requests = dict(served.scheduler.requests)
    first: dict[str, int] = {}
    while served.scheduler.requests:
        served.step()
        for name, request in requests.items():
            if request.num_output_tokens:
                first.setdefault(name, served.steps)
    steps = served.steps
    served.drain()
    served.check_idle()
    return steps, sum(first.values()) / len(first)


@pytest.mark.parametrize("answer_tokens", [1, 4])
@pytest.mark.parametrize("chunks_per_step", [9, 12, 16])
def test_requests_do_not_queue_for_a_disk_while_the_gpu_is_idle(
    chunks_per_step: int, answer_tokens: int, tmp_path: Path
) -> None:
    """Some requests are computed while the others load. The first and the last answers come earlier
    than if all requests waited for the disk, although the disk is faster than the GPU."""
    results, reads = {}, {}
    for on in (False, True):
        with world(tmp_path / str(on), answer_tokens, break_even=on) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), chunks_per_step)
            measured(served, chunks_per_step)
            results[on] = serve_all(served)
            reads[on] = len(served.disk.order)
            reasons = served.connector.serving.side.log.totals()
            assert bool(reasons.get(f"misses:{Reason.BREAK_EVEN.value}")) == on
    assert results[True][0] < results[False][0], results
    assert results[True][1] < 0.9 * results[False][1], results
    assert 0 < reads[True] < reads[False] == PROMPTS * CHUNKS


def test_requests_that_come_together_share_the_disk_and_the_gpu(tmp_path: Path) -> None:
    """The second would compute in 4.2 s instead of waiting 5 s. The third and the fourth would
    have to wait for it."""
    with world(tmp_path, 4, batched_tokens=2048) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), 12)
        measured(served, 12)
        served.step()
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        requests = served.scheduler.requests
        loads = [requests[f"again{n}"].status == loading for n in range(PROMPTS)]
        assert loads == [True, False, True, True, False, True]
        served.drain()
        served.check_idle()


def test_alone_a_request_loads_all_that_it_can_in_time(tmp_path: Path) -> None:
    """Half of ten steps are enough for 25 chunks of 30; the rest is computed."""
    with world(tmp_path, 4, break_even=False) as served:
        served.begin(prompts_of(1, TOKENS), 5)
        measured(served, 5)
        served.planner.health[0].break_even.timeout_s = 10.0
        serve_all(served)
        assert len(served.disk.order) == 25
        assert served.loaded()["file"] == 25 * CHUNK
        logged = served.connector.serving.side.log.last[-1]
        assert logged.miss.reason is Reason.BREAK_EVEN
        assert logged.miss.note == ShortenReason.DEADLINE.value

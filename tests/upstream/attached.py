"""The ``conftest.py`` that vLLM's tests run with: our parts take the place of vLLM's.

It is copied next to vLLM's tests, because their package is called ``tests``, too.

* Every scheduler that vLLM's tests make without a connector gets ours, with a planner. Every
  store fails, so it never returns a hit, and the scheduler must behave as without it.
* Where a test makes a scheduler with vLLM's mock connector, whose asynchronous hits all have the
  same length, ours takes its place and holds that much of each prompt, so that it answers real
  hits. The test itself says when a load has ended.
* The CPU tier of vLLM's offloading uses our LRU instead of vLLM's.

With ``KVTIERS_UPSTREAM=plain`` nothing is replaced: tests that fail then fail for other reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

IS_PLAIN = os.environ.get("KVTIERS_UPSTREAM") == "plain"
SLOT_BYTES = 4096
TRANSFER = {
    "kv_connector": "OffloadConnector",
    "kv_connector_module_path": "offload.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu": {"capacity": 256 * SLOT_BYTES}, "tiers": []},
}

HITS: dict[str, int] = {}
"""The tokens of each prompt that a connector holds, by the engine id of its configuration."""
attached: list[Any] = []
"""Our connectors and policies that the running test has made."""


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("cpu_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{mark}: a mark of vLLM's tests")
    if not IS_PLAIN:
        patch = pytest.MonkeyPatch()  # which fails if vLLM has renamed what it replaces
        config.add_cleanup(patch.undo)
        _replace_connectors(patch)
        _replace_policies(patch)


def _replace_connectors(patch: pytest.MonkeyPatch) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    # vLLM's package of this name, in the folder of this copy
    utils = import_module("tests.v1.core.utils")
    test_scheduler = import_module("tests.v1.core.test_scheduler")
    real_config, real_init = utils.VllmConfig, Scheduler.__init__

    def make_config(**options: Any) -> Any:
        given = options.get("kv_transfer_config")
        hit = _hit_of_mock(given)
        if given is None or hit:
            ours = options["kv_transfer_config"] = KVTransferConfig(**TRANSFER)
            HITS[str(ours.engine_id)] = hit
        return real_config(**options)

    def init(scheduler: Any, *args: Any, **options: Any) -> None:
        real_init(scheduler, *args, **options)
        _let_plan(scheduler)

    patch.setattr(utils, "VllmConfig", make_config)
    patch.setattr(test_scheduler, "VllmConfig", make_config)
    patch.setattr(test_scheduler, "_assert_right_scheduler_output", _right_output)
    patch.setattr(Scheduler, "__init__", init)


def _hit_of_mock(transfer: Any) -> int:
    """The length of the asynchronous hits of vLLM's mock connector."""
    if transfer is None or transfer.kv_connector != "MockKVConnector":
        return 0
    extra = transfer.kv_connector_extra_config
    is_plain = extra["is_async"] and not extra.get("num_defers_before_matching")
    return int(extra["matched_tokens"]) if is_plain else 0


def _right_output(output: Any, num_requests: int, expected_num_scheduled_tokens: int) -> None:
    """Replaces a check which counts requests in the mock's metadata; there, the mock lists those
    that are new or resumed."""
    resumed = output.scheduled_cached_reqs.resumed_req_ids
    assert len(output.scheduled_new_reqs) + len(resumed) == num_requests
    assert {*output.num_scheduled_tokens.values()} <= {expected_num_scheduled_tokens}


def _let_plan(scheduler: Any) -> None:
    """Pass the data that workers send at start-up, and report each store as they do."""
    from offload.connector.connector import OffloadConnector
    from offload.connector.metadata import OffloadHandshake
    from offload.messages.report import RankState

    connector = scheduler.connector
    if not isinstance(connector, OffloadConnector):
        return
    state = RankState(0, connector._setup.namespace, 0, 256, SLOT_BYTES, ())
    connector.set_xfer_handshake_metadata({0: OffloadHandshake(state)})
    assert connector.serving is not None
    attached.append(connector)
    _hold_prompts(scheduler)
    take_output = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        if scheduled.kv_connector_metadata is not None:  # the test has created the step itself
            connector.update_connector_output(_answers(scheduled.kv_connector_metadata))
        return take_output(scheduled, output)

    scheduler.update_from_output = update_from_output


def _hold_prompts(scheduler: Any) -> None:
    """Store the beginning of a prompt before its request arrives, as an earlier request would have
    done."""
    connector, add_request = scheduler.connector, scheduler.add_request
    hit = HITS.get(scheduler.vllm_config.kv_transfer_config.engine_id, 0)

    def add(request: Any) -> None:
        from offload.index.chunk_batch import ChunkBatch

        side = connector.serving.side
        identity = side.admit(request).identity
        identity.extend(request.block_hashes)
        size = connector._setup.layout.groups[0].chunk_tokens
        keys = identity.keys[0][: hit // size]
        ends = range(size, (len(keys) + 1) * size, size)
        side.planner.stores.plan(ChunkBatch(keys, 0, range(1, len(keys) + 1), ends))
        plan = side.planner.step()
        connector.update_connector_output(_output({job.job: False for job in plan.stores}))
        add_request(request)

    if hit:
        scheduler.add_request = add


def _answers(metadata: Any) -> Any:
    """The output of workers after a step: every store has failed, so that nothing is held, and
    every load has ended."""
    plan = metadata.plan
    return _output({job.job: True for job in plan.stores} | {job.job: False for job in plan.loads})


def _output(failed: dict[int, bool]) -> Any:
    """The output of workers that have done these jobs."""
    from vllm.v1.outputs import KVConnectorOutput

    from offload.connector.metadata import OffloadWorkerMetadata
    from offload.messages.report import JobResult, StepReport

    done = {job: JobResult(failed=has_failed) for job, has_failed in failed.items()}
    return KVConnectorOutput(kv_connector_worker_meta=OffloadWorkerMetadata(StepReport(done)))


def _replace_policies(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    real = CachePolicyFactory.get_cache_policy_cls

    def ours(name: str, path: str | None = None) -> Any:
        if name in ("lru", "arc") and path is None:
            found = real(f"kvtiers_{name}", "offload.connector.cache_policy")
            attached.append(found)
            return found
        return real(name, path)

    patch.setattr(CachePolicyFactory, "get_cache_policy_cls", staticmethod(ours))


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The fixture of vLLM's ``conftest.py`` that the chosen files use."""
    return caplog


@pytest.fixture(autouse=True)
def _no_hook_fails(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Our hooks catch all exceptions; here that would hide a break of the contract."""
    attached.clear()
    yield
    if attached:
        record_property("ours", len(attached))
    for each in attached:
        faults = getattr(each, "faults", None)  # a policy raises
        assert faults is None or faults.by_hook == {}, faults.by_hook

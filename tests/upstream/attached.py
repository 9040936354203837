"""The ``conftest.py`` that vLLM's tests run with: our parts take the place of vLLM's.

It is copied beside them, because their package is called ``tests``, too.

* Every scheduler that they make without a connector gets ours, with a planner. Every store fails,
  so it never returns a hit, and the scheduler must behave as without it.
* The CPU tier of vLLM's offloading takes our LRU for its own.

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

attached: list[Any] = []
"""Our connectors and policies that the running test has made."""


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("cpu_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{mark}: a mark of vLLM's tests")
    if not IS_PLAIN:
        _replace_connectors()
        _replace_policies()


def _replace_connectors() -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    # vLLM's package of this name, in the folder of this copy
    modules = [import_module(f"tests.v1.core.{name}") for name in ("utils", "test_scheduler")]
    real_config, real_init = modules[0].VllmConfig, Scheduler.__init__

    def make_config(**options: Any) -> Any:
        if options.get("kv_transfer_config") is None:
            options["kv_transfer_config"] = KVTransferConfig(**TRANSFER)
        return real_config(**options)

    def init(scheduler: Any, *args: Any, **options: Any) -> None:
        real_init(scheduler, *args, **options)
        _let_plan(scheduler)

    for module in modules:
        module.VllmConfig = make_config  # type: ignore[attr-defined]  # whose names are theirs
    Scheduler.__init__ = init


def _let_plan(scheduler: Any) -> None:
    """Pass the data that workers send at start-up, and report each store as they do."""
    from offload.connector.connector import OffloadConnector
    from offload.connector.handshake import OffloadHandshake
    from offload.messages.report import RankState

    connector = scheduler.connector
    if not isinstance(connector, OffloadConnector):
        return
    state = RankState(0, connector._setup.namespace, 0, 256, SLOT_BYTES, ())
    connector.set_xfer_handshake_metadata({0: OffloadHandshake(state)})
    assert connector._scheduler is not None
    assert connector._scheduler.planner is not None
    attached.append(connector)
    take_output = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        if scheduled.kv_connector_metadata is not None:  # the test has created the step itself
            connector.update_connector_output(_answers(scheduled.kv_connector_metadata))
        return take_output(scheduled, output)

    scheduler.update_from_output = update_from_output


def _answers(metadata: Any) -> Any:
    """The output of workers on which every store of a step has failed, so that nothing is held."""
    from vllm.v1.outputs import KVConnectorOutput

    from offload.connector.handshake import OffloadWorkerMetadata
    from offload.messages.report import JobResult, StepReport

    done = {store.job: JobResult(failed=True) for store in metadata.plan.stores}
    return KVConnectorOutput(kv_connector_worker_meta=OffloadWorkerMetadata(StepReport(done)))


def _replace_policies() -> None:
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    real = CachePolicyFactory.get_cache_policy_cls

    def ours(name: str, path: str | None = None) -> Any:
        if name in ("lru", "arc") and path is None:
            found = real(f"kvtiers_{name}", "offload.connector.cache_policy")
            attached.append(found)
            return found
        return real(name, path)

    CachePolicyFactory.get_cache_policy_cls = ours


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

"""The connector's hooks as vLLM's model runners call them: through vLLM's own classes, in the order
of the installed version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from offload.connector.connector import OffloadConnector


class RunnerV1:
    """With draft tokens, the plan is posted after the drafter; results are collected before it."""

    def __init__(
        self, config: VllmConfig, connector: OffloadConnector, caches: dict[str, torch.Tensor]
    ) -> None:
        self._config = config
        self._connector = connector
        self._is_drafting = config.speculative_config is not None
        connector.register_kv_caches(caches)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Call at the start of a step, before blocks are zeroed or copied."""
        self._connector.handle_preemptions(scheduled.kv_connector_metadata)

    def run(
        self,
        scheduled: SchedulerOutput,
        forward: Callable[[], None],
        draft: Callable[[], None],
    ) -> KVConnectorOutput | None:
        """Run a step with this forward pass and this drafter."""
        mixin = KVConnectorModelRunnerMixin
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self._connector)
            if not scheduled.total_num_scheduled_tokens:
                return mixin.kv_connector_no_forward(scheduled, self._config).kv_connector_output
            with (
                set_forward_context(None, self._config),
                mixin.maybe_get_kv_connector_output(
                    scheduled, defer_finalize=self._is_drafting
                ) as output,
            ):
                forward()
            draft()
            if self._is_drafting:
                mixin.finalize_kv_connector()
        return output


class RunnerV2:
    """Fences come after blocks were zeroed and copied. With a drafter, vLLM 0.33 collects results
    before it runs the drafter and posts the plan after it; 0.32 does both after it."""

    def __init__(
        self, config: VllmConfig, connector: OffloadConnector, caches: dict[str, torch.Tensor]
    ) -> None:
        self._is_drafting = config.speculative_config is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
            self._hooks: Any = ActiveKVConnector(config, caches)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Call at the start of a step: nothing happens before blocks are zeroed and copied."""

    def run(
        self,
        scheduled: SchedulerOutput,
        forward: Callable[[], None],
        draft: Callable[[], None],
    ) -> KVConnectorOutput | None:
        """Run a step with this forward pass and this drafter."""
        hooks, done = self._hooks, scheduled.finished_req_ids
        if not scheduled.total_num_scheduled_tokens:
            output: KVConnectorOutput | None = hooks.no_forward(scheduled).kv_connector_output
            return output
        hooks.pre_forward(scheduled)
        forward()
        hooks.finish_forward()
        if self._is_drafting and hasattr(hooks, "finalize_step"):
            output = hooks.post_forward(done, defer_finalize=True)
            draft()
            hooks.finalize_step()
        else:
            draft()
            output = hooks.post_forward(done)
        return output

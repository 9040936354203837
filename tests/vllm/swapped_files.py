"""A worker whose model's folder is replaced as soon as vLLM has loaded the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tests.vllm.worker_extension import KvBytes

OTHER = "KVTEST_OTHER_MODEL"
"""The variable that names the folder which takes the model's place."""

_load = BaseModelLoader.load_model


def _load_and_swap(self: Any, vllm_config: Any, model_config: Any, **named: Any) -> Any:
    loaded = _load(self, vllm_config, model_config, **named)
    model, other = Path(model_config.model), Path(os.environ[OTHER])
    model.rename(model.with_name("loaded"))
    other.rename(model)
    return loaded


if OTHER in os.environ:
    BaseModelLoader.load_model = _load_and_swap


class SwapsFiles(KvBytes):
    """Its import makes the loaders of an engine replace the folder."""

"""KV cache dtypes that a platform plugin registers, and fields that a newer version adds to a
spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import cache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from offload.connector.compat import cache_dtype_handler
from offload.connector.model import identity
from offload.connector.model.identity import _spec
from tests.offload.connector.kv_cache_configs import full
from tests.offload.connector.model.tiny_configs import (
    config_of,
    differing,
    make_model,
    namespace_of,
)

since_33 = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 33), reason="vLLM 0.32 has no registered dtypes"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noted(FullAttentionSpec):
    note: bool = dataclasses.field(default=False, compare=False)


def test_a_field_that_does_not_change_a_spec_does_not_change_the_namespace() -> None:
    """An example is `AttentionSpec.is_draft` of 0.33: a merged spec has the value of one of its
    layers."""
    values = {"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    one, other = _Noted(**values, note=True), _Noted(**values)
    assert one == other
    assert _spec(one) == _spec(other)
    assert _spec(full(32)) != _spec(full(64))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache, "KV_CACHE_DTYPES", list(cache.KV_CACHE_DTYPES))
    monkeypatch.setattr(cache, "_KV_CACHE_DTYPE_HANDLERS", {})
    yield
    for name in ("mine", "yours"):
        STR_DTYPE_TO_TORCH_DTYPE.pop(name, None)


class Handler:
    name = "mine"

    def torch_dtype(self) -> torch.dtype:
        return torch.int8

    def quant_mode(self) -> KVQuantMode:
        return KVQuantMode.CUSTOM


class OtherHandler(Handler):
    pass


def namespace_with(handler: type[Handler], name: str, model: Path) -> Any:
    cache.register_kv_cache_dtype(name)(handler)
    return namespace_of(config_of(model, kv_cache_dtype=name))


def test_the_handler_of_a_dtype_is_part_of_the_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM 0.32 has no handlers, so the test gives each dtype one."""
    model, found = make_model(tmp_path / "model"), []
    for handler in (None, Handler(), OtherHandler()):
        monkeypatch.setattr(identity, "cache_dtype_handler", lambda _dtype, it=handler: it)
        found.append(namespace_of(config_of(model)))
    plain, mine, other = found
    assert differing(plain, mine) == differing(mine, other) == ["cache.dtype_handler"]


@since_33
def test_a_registered_dtype_is_identified_with_its_handler(registry: None, tmp_path: Path) -> None:
    """All such dtypes have the same mode, which is also the mode of a dtype of vLLM."""
    assert KVQuantMode.CUSTOM is KVQuantMode.OCTAVE_K3V4
    model = make_model(tmp_path / "model")
    mine = namespace_with(Handler, "mine", model)
    assert namespace_with(Handler, "mine", model) == mine
    other = namespace_with(OtherHandler, "mine", model)
    assert differing(mine, other) == ["cache.dtype_handler"]
    assert differing(mine, namespace_with(Handler, "yours", model)) == ["cache.dtype"]


def test_a_dtype_of_vllm_has_no_handler() -> None:
    assert cache_dtype_handler("auto") is None
    assert cache_dtype_handler("fp8") is None

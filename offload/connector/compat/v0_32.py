"""vLLM 0.32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def plan_kv_cache(
    config: VllmConfig, specs: Mapping[str, KVCacheSpec], memory: int
) -> KVCacheConfig:
    """Plan the KV cache of one worker with layers of these specs and ``memory`` bytes.

    Raises whatever vLLM raises if they do not fit.
    """
    return get_kv_cache_configs(config, [dict(specs)], [memory])[0]


def cache_dtype_handler(dtype: str) -> object | None:
    """The handler of a KV cache dtype that a platform plugin has registered. This version knows its
    own dtypes only."""
    return None


def follow_sleep() -> None:
    """Have the worker of this process call ``unregister_kv_caches`` before it unmaps the KV cache
    and ``restore_kv_caches`` after it has mapped it again. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    for name, hook, is_before in (
        ("sleep", "unregister_kv_caches", True),
        ("discard", "unregister_kv_caches", True),
        ("wake_up", "restore_kv_caches", False),
    ):
        original = vars(Worker).get(name)
        if original is not None and original not in _FOLLOWED:
            _FOLLOWED.append(_with_hook(original, hook, is_before=is_before))
            setattr(Worker, name, _FOLLOWED[-1])


def _with_hook(original: Callable[..., Any], hook: str, *, is_before: bool) -> Callable[..., Any]:
    """A method of the worker that calls a hook of the connector as well, if the KV cache is among
    the ``tags`` that it is called with."""

    @wraps(original)
    def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        tags = [*args, *kwargs.values()]
        of_cache = original.__name__ == "sleep" or tags in ([], [None]) or "kv_cache" in tags[0]
        call = getattr(get_kv_transfer_group(), hook) if has_kv_transfer_group() else None
        if of_cache and is_before and call is not None:
            call()
        found = original(worker, *args, **kwargs)
        if of_cache and not is_before and call is not None:
            call()
        return found

    return method


_FOLLOWED: list[Callable[..., Any]] = []

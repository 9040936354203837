"""Makes the workers of a vLLM before 0.33, which has no sleep-mode hooks, call the connector's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


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

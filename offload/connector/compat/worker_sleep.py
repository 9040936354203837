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
        calls = _hooks(hook) if of_cache else []
        for call in calls if is_before else ():
            call()
        found = original(worker, *args, **kwargs)
        for call in () if is_before else calls:
            call()
        return found

    return method


def _hooks(name: str) -> list[Callable[[], None]]:
    """This hook of the connectors that have it: this version's ``MultiConnector`` has it only in
    its connectors."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    connectors = getattr(group, "sub_connectors", [group])
    return [getattr(one, name) for one in connectors if hasattr(one, name)]


_FOLLOWED: list[Callable[..., Any]] = []
